"""Image and objects changed together: resized, mirrored, cut to what can be learned."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

from visualtokens.data.detection import Objects
from visualtokens.errors import UserError, unknown

PRESETS = ("none", "photo", "multiscale")
SMALLEST_SIDE = 1.0  # of a box that can be learned, in pixels of the resized image


@dataclass(frozen=True)
class Sizing:
    """How training images are resized and mirrored.

    The short side becomes one of ``short``, drawn for each image, unless the long side would then exceed
    ``long``. Mirroring is off unless asked for: a digit in the mirror is another sign.
    """

    short: tuple[int, ...] = (800,)
    long: int = 1333
    flip: float = 0.0  # probability

    def __post_init__(self) -> None:
        if not self.short or min(self.short) < 1:
            raise UserError(f"short={self.short} are not sides in pixels; give at least one")
        if self.long < max(self.short):
            raise UserError(f"long={self.long} is less than the short side {max(self.short)}")
        if not 0 <= self.flip <= 1:
            raise UserError(f"flip={self.flip} is not between 0 and 1")

    @classmethod
    def preset(cls, name: str, *, short: int, long: int) -> Sizing:
        """By name: ``none``; ``photo``, which mirrors half of the images; ``multiscale``, which also draws
        the short side from 0.6 times ``short`` on in steps of 32 pixels, 480 to 800 for COCO."""
        if name not in PRESETS:
            raise unknown("augmentation of detection", name, PRESETS)
        first = min(short, round(0.6 * short))
        sides = tuple(range(short, first - 1, -32)) if name == "multiscale" else (short,)
        return cls(tuple(sorted(sides)), long, 0.0 if name == "none" else 0.5)

    def __call__(
        self, image: Image.Image, objects: Objects, rng: np.random.Generator
    ) -> tuple[Tensor, Objects]:
        """The image ``(3, H, W)`` uint8, and those of its objects that can be learned, where they now are."""
        before = (image.height, image.width)
        size = fit(before, short=int(rng.choice(self.short)), long=self.long)
        parts = [image, tv_tensors.BoundingBoxes(objects.boxes, format="XYXY", canvas_size=before)]
        if objects.masks is not None:
            parts.append(tv_tensors.Mask(objects.masks))
        parts = [functional.resize(part, list(size)) for part in parts]
        if rng.random() < self.flip:
            parts = [functional.horizontal_flip(part) for part in parts]
        boxes = functional.clamp_bounding_boxes(parts[1]).as_subclass(Tensor)
        masks = None if objects.masks is None else parts[2].as_subclass(Tensor)
        moved = replace(objects, boxes=boxes, masks=masks)
        return functional.pil_to_tensor(parts[0]), moved.take(_learnable(moved))


def fit(size: tuple[int, int], *, short: int, long: int) -> tuple[int, int]:
    """``size`` (H, W) with its short side at ``short``, or less where the long one would exceed ``long``.

    No side becomes less than one pixel, however thin the image is.
    """
    scale = min(short / min(size), long / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _learnable(objects: Objects) -> Tensor:
    """Which are single objects (no crowd) and not too small."""
    sides = objects.boxes[:, 2:] - objects.boxes[:, :2]  # (n, 2)
    return ~objects.crowd & (sides >= SMALLEST_SIDE).all(1)


def as_is(image: Image.Image, objects: Objects) -> tuple[Tensor, Objects]:
    """For evaluation: the image ``(3, H, W)`` uint8 and all its objects, unchanged."""
    return functional.pil_to_tensor(image), objects


def to_floats(image: Tensor) -> Tensor:
    """uint8 to what detectors take: 0 to 1."""
    return functional.to_dtype(image, torch.float32, scale=True)
