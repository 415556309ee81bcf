"""The patch features of any classifier: the tokens between the blocks of a ViT, or the maps of a CNN."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.modes import eval_mode
from visualtokens.reduce.encoder import Encoder
from visualtokens.reduce.families import encoder_of

Grid = tuple[int, int]
# Cells of the grid on which features are compared: a 7×7 map is too coarse for regions, and the distances of
# all cells of the finest map of a detector would not fit into memory.
MIN_CELLS, MAX_CELLS = 100, 4096


@dataclass(frozen=True)
class Features:
    """The features of the patches at one layer, for one image."""

    layer: str  # the module that they are the input (ViT) or output (CNN) of
    values: Tensor  # (h, w, C), float32


def record_features(model: nn.Module, x: Tensor) -> list[Features]:
    """The features of ``x (1, 3, H, W)`` at every layer, first to last.

    For a vision transformer, the layers are the inputs of its blocks after the first: the patches of the last
    output may not reach a class token. For other models they are the last feature map of every resolution;
    a model may have none.
    """
    with eval_mode(model), torch.no_grad(), recording(model, x) as found:
        model(x)
    return [Features(name, on_grid(raw, layout)) for name, (raw, layout) in found.items()]


def recording(model: nn.Module, x: Tensor) -> contextlib.AbstractContextManager[Found]:
    """Collect the features of the forward passes of ``x (1, 3, H, W)`` inside the block, with their graph."""
    encoder = find_encoder(model)
    return _block_inputs(encoder, x) if encoder else _feature_maps(model, x)


def find_encoder(model: nn.Module) -> Encoder | None:
    """The vision transformer in ``model``, None if there is none of a kind that :mod:`reduce` knows."""
    try:
        return encoder_of(model)
    except UserError:
        return None


Layout = tuple[str, int, Grid]  # "tokens", "channels first" or "channels last"; prefix; grid
Found = dict[str, tuple[Tensor, Layout]]


def on_grid(raw: Tensor, layout: Layout) -> Tensor:
    """``(h, w, C)`` of the first image."""
    kind, prefix, grid = layout
    first = raw.detach()[0].float()
    if kind == "tokens":
        return first.flatten(0, -2)[prefix:].unflatten(0, grid)
    return first.permute(1, 2, 0) if kind == "channels first" else first


@contextlib.contextmanager
def _block_inputs(encoder: Encoder, x: Tensor) -> Iterator[Found]:
    names = {module: name for name, module in encoder.root.named_modules()}
    grid, found = encoder.grid((x.shape[2], x.shape[3])), Found()

    def note(block: nn.Module, args: tuple[Any, ...]) -> None:
        tokens = args[0]
        if tokens.flatten(1, -2).shape[1] == encoder.prefix + grid[0] * grid[1]:  # not reduced yet
            found[names[block]] = tokens, ("tokens", encoder.prefix, grid)

    handles = [block.register_forward_pre_hook(note) for block in encoder.blocks[1:]]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _feature_maps(model: nn.Module, x: Tensor) -> Iterator[Found]:
    found: Found = {}
    latest: dict[Grid, str] = {}  # the layer that last returned a map of this grid
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        layout = _map_layout(output, x)
        if layout is None:
            return
        found.pop(latest.get(layout[2], ""), None)
        latest[layout[2]] = names[module]
        found[names[module]] = output, layout

    handles = [module.register_forward_hook(note) for module in model.modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _map_layout(output: Any, x: Tensor) -> Layout | None:
    """How ``output`` is a feature map of ``x``: its cells are squares of at least 2×2 pixels."""
    if not isinstance(output, Tensor) or output.ndim != 4 or output.shape[0] != x.shape[0]:
        return None
    for kind, (h, w) in (("channels first", output.shape[2:]), ("channels last", output.shape[1:3])):
        if h > 1 and w > 1 and x.shape[2] % h == 0 and x.shape[2] // h == x.shape[3] // w >= 2:
            return kind, 0, (h, w)
    return None


def descriptors(layers: list[Features]) -> tuple[Tensor, str]:
    """``(h, w, C)``: features by which patches are grouped into regions, and the layer they come from.

    For a ViT, the last input of a block. For other models, the coarsest map with at least ``MIN_CELLS``
    cells, joined by the coarser ones, each with unit vectors around its mean. Maps of more than ``MAX_CELLS``
    cells are averaged over squares of them.
    """
    last = layers[-1]
    if MIN_CELLS <= _cells(last) <= MAX_CELLS or len(layers) == 1:
        return _pooled(_unit(last.values)), last.layer
    fine = [one for one in layers if _cells(one) >= MIN_CELLS]
    base = min(reversed(fine), key=_cells) if fine else layers[0]
    grid = base.values.shape[:2]
    joined = [base, *(one for one in layers if _cells(one) < _cells(base))]
    values = torch.cat([_resized(_unit(one.values), grid) for one in joined], dim=2)
    return _pooled(values), joined[-1].layer


def _cells(one: Features) -> int:
    return one.values.shape[0] * one.values.shape[1]


def _pooled(values: Tensor) -> Tensor:
    """``(h, w, C)`` with at most ``MAX_CELLS`` cells."""
    side = math.ceil((values.shape[0] * values.shape[1] / MAX_CELLS) ** 0.5)
    if side <= 1:
        return values
    return F.avg_pool2d(values.permute(2, 0, 1)[None], side, ceil_mode=True)[0].permute(1, 2, 0)


def _unit(values: Tensor) -> Tensor:
    return F.normalize(values - values.mean((0, 1)), dim=2)


def _resized(values: Tensor, grid: torch.Size) -> Tensor:
    moved = values.permute(2, 0, 1).unsqueeze(0)
    return F.interpolate(moved, size=tuple(grid), mode="bilinear")[0].permute(1, 2, 0)
