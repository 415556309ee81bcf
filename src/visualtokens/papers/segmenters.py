"""FPN and VT-FPN as Tables 9 and 10 of Visual Transformers count them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from visualtokens.bench import macs_by_module
from visualtokens.layers import TokenConv
from visualtokens.tasks.segment import Segmenter, create

CLASSES: Mapping[str, int] = {"coco-stuff": 91, "lip": 20}
PYRAMID = "decoder.pyramid"  # "FPN FLOPs" are those of this part


def segmenter(head: str, depth: int, dataset: str) -> Segmenter:
    """``fpn`` or ``vt_fpn`` on a ResNet whose stages begin with the stride, as the paper's do."""
    return create(head, backbone=f"resnet{depth}", classes=CLASSES[dataset], stride_first=True)


def total_gmacs(model: nn.Module, size: tuple[int, int]) -> float:
    return _gmacs(model, size, "", tokens=True)


def pyramid_gmacs(model: nn.Module, size: tuple[int, int]) -> float:
    return _gmacs(model, size, PYRAMID, tokens=True)


def total_pixel_gmacs(model: nn.Module, size: tuple[int, int]) -> float:
    """Without the 1×1 convolutions of tokens, which is what the paper counts."""
    return _gmacs(model, size, "", tokens=False)


def pyramid_pixel_gmacs(model: nn.Module, size: tuple[int, int]) -> float:
    """Without the 1×1 convolutions of tokens, which is what the paper counts."""
    return _gmacs(model, size, PYRAMID, tokens=False)


def _gmacs(model: nn.Module, size: tuple[int, int], part: str, *, tokens: bool) -> float:
    counts = macs_by_module(model, size, depth=None)
    total = counts[part]
    if not tokens:
        total -= sum(counts.get(name, 0) for name, m in model.named_modules() if isinstance(m, TokenConv))
    return total / 1e9
