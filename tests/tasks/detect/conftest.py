"""Detectors small enough to run in a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from visualtokens.tasks.detect import create

CLASSES = 3


@pytest.fixture
def small() -> Callable[..., Any]:
    """Makes a small detector of three classes for images of 64 pixels."""

    def make(detector: str, **options: Any) -> Any:
        torch.manual_seed(0)
        defaults = dict(backbone="paca_vit_nano", classes=CLASSES, short=64, long=96)
        return create(detector, **{**defaults, "width": 16, "hidden": 32, "regions": 32, **options})

    return make


def image(height: int = 64, width: int = 64, seed: int = 0) -> Tensor:
    return torch.rand(3, height, width, generator=torch.Generator().manual_seed(seed))


def target(
    boxes: list[list[float]], labels: list[int], size: tuple[int, int] = (64, 64)
) -> dict[str, Tensor]:
    """Objects whose masks fill their boxes."""
    masks = torch.zeros(len(boxes), *size, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
        mask[int(top) : int(bottom), int(left) : int(right)] = 1
    return {
        "boxes": torch.tensor(boxes).reshape(-1, 4),
        "labels": torch.tensor(labels).long(),
        "masks": masks,
    }


NOTHING = target([], [])
TWO = target([[8.0, 10.0, 40.0, 50.0], [30.0, 5.0, 60.0, 30.0]], [1, 3])
