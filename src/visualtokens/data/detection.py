"""Detection data: images with objects, resizing both together, and batches of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

from visualtokens.data.base import AnnotatedImages, Share
from visualtokens.data.batch import ImageBatch
from visualtokens.data.decode import BadAnnotation, BadImage
from visualtokens.data.loader import Loader, Pipeline, load_items
from visualtokens.data.scenes import DigitScenes
from visualtokens.errors import UserError, unknown

SIZING_PRESETS = ("none", "photo", "multiscale")
MIN_BOX_SIDE = 1.0  # pixels of the resized image; smaller objects are not trained on


@dataclass(frozen=True, eq=False)
class Objects:
    """The n objects of one image."""

    boxes: Tensor  # (n, 4) float32: left, top, right, bottom in pixels; right - left is the width
    labels: Tensor  # (n,) int64: class of each object
    masks: Tensor | None  # (n, H, W) bool: visible pixels; None for a detector of boxes
    crowd: Tensor  # (n,) bool: a region of many objects, excluded from training and evaluation
    area: Tensor  # (n,) float32: pixels; separates COCO's small, medium and large objects

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, which: Tensor) -> Objects:
        """A subset of the objects, by index or by a bool mask ``(n,)``."""
        masks = None if self.masks is None else self.masks[which]
        return Objects(self.boxes[which], self.labels[which], masks, self.crowd[which], self.area[which])

    def to(self, device: torch.device, *, non_blocking: bool = True) -> Objects:
        """The objects with the targets of the loss (boxes, labels, masks) on the device."""
        return self._targets(lambda target: target.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Objects:
        """The objects with the targets of the loss in page-locked memory."""
        return self._targets(Tensor.pin_memory)

    def tensors(self) -> list[Tensor]:
        """All tensors of the record."""
        masks = [] if self.masks is None else [self.masks]
        return [self.boxes, self.labels, self.crowd, self.area, *masks]

    def _targets(self, function: Callable[[Tensor], Tensor]) -> Objects:
        masks = None if self.masks is None else function(self.masks)
        return replace(self, boxes=function(self.boxes), labels=function(self.labels), masks=masks)


class DetectionDataset(AnnotatedImages[Objects]):
    """RGB images, each with its objects, possibly none."""

    bad: Mapping[
        int, BadAnnotation
    ] = {}  # invalid annotations known on opening, by index; reading raises them


class SceneObjects(DetectionDataset):
    """The digits of :class:`DigitScenes` as objects."""

    def __init__(self, scenes: DigitScenes, *, masks: bool = True) -> None:
        self.scenes = scenes
        self.masks = masks
        self.classes = scenes.classes
        self.spec = scenes.spec

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> tuple[Image.Image, Objects]:
        scene = self.scenes.scene(index)
        crowd = torch.zeros(len(scene.labels), dtype=torch.bool)
        area = scene.masks.sum((1, 2)).float()
        masks = scene.masks if self.masks else None
        return scene.image, Objects(scene.boxes, scene.labels, masks, crowd, area)

    def path(self, index: int) -> str:
        return self.scenes.path(index)


@dataclass(frozen=True)
class Sizing:
    """Random resizing and flipping of training images, with their objects.

    The short side is drawn from ``short`` for each image, and reduced where the long side would exceed
    ``long``. Flips are off by default: mirrored digits have another meaning, or none.
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
        """The preset ``none``, ``photo`` (with flips) or ``multiscale`` (with flips and several short sides).

        The short sides of ``multiscale`` are ``short`` and smaller ones in steps of 32 pixels, down to 0.6
        times ``short``: 480 to 800 for COCO.
        """
        if name not in SIZING_PRESETS:
            raise unknown("augmentation of detection", name, SIZING_PRESETS)
        lowest = min(short, round(0.6 * short))
        sides = tuple(range(short, lowest - 1, -32)) if name == "multiscale" else (short,)
        return cls(tuple(sorted(sides)), long, 0.0 if name == "none" else 0.5)

    def __call__(
        self, image: Image.Image, objects: Objects, rng: np.random.Generator
    ) -> tuple[Tensor, Objects]:
        """The resized image ``(3, H, W)`` uint8, and its objects without crowds and vanishing boxes."""
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
        sides = boxes[:, 2:] - boxes[:, :2]  # (n, 2)
        trainable = ~objects.crowd & (sides >= MIN_BOX_SIDE).all(1)  # (n,)
        return functional.pil_to_tensor(parts[0]), moved.take(trainable)


def fit(size: tuple[int, int], *, short: int, long: int) -> tuple[int, int]:
    """``size`` (H, W) scaled to a short side of ``short``, or less where the long side would exceed ``long``.

    No side becomes less than one pixel.
    """
    scale = min(short / min(size), long / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def to_floats(image: Tensor) -> Tensor:
    """The input of a detector: uint8 pixels scaled to 0 to 1."""
    return functional.to_dtype(image, torch.float32, scale=True)


@dataclass(frozen=True, eq=False)
class DetectionBatch(ImageBatch):
    """Images of different sizes with their objects."""

    images: tuple[Tensor, ...]  # (3, H, W) uint8 each
    objects: tuple[Objects, ...]
    index: Tensor
    bad: tuple[BadImage, ...]

    on_device = ("images", "objects")


@dataclass(frozen=True)
class DetectionPipeline(Pipeline[Objects, tuple[Tensor, Objects], DetectionBatch]):
    """Resized images with the objects to train on; without ``sizing``, unchanged images with all objects."""

    sizing: Sizing | None

    def prepare(
        self, image: Image.Image, objects: Objects, rng: np.random.Generator
    ) -> tuple[Tensor, Objects]:
        if self.sizing is None:
            return functional.pil_to_tensor(image), objects
        return self.sizing(image, objects, rng)

    def collate(
        self, prepared: list[tuple[Tensor, Objects]], index: Tensor, bad: tuple[BadImage, ...]
    ) -> DetectionBatch:
        images, objects = tuple(image for image, _ in prepared), tuple(objects for _, objects in prepared)
        return DetectionBatch(images, objects, index, bad)


def create_detection_loader(
    dataset: DetectionDataset,
    *,
    batch: int,
    sizing: Sizing | None,
    seed: int = 0,
    workers: int = 0,
    share: Share | None = None,
    pin_memory: bool = False,
) -> Loader[DetectionBatch]:
    """A loader of :class:`DetectionBatch`.

    With ``sizing``, for training: images are shuffled, resized and flipped with random numbers that depend on
    ``seed``, epoch and item only. With ``sizing=None``, for evaluation: in order and unchanged, with all
    objects. An image that cannot be read, or whose annotation cannot be used, is listed in ``bad`` and not
    replaced.
    """
    return load_items(
        dataset,
        DetectionPipeline(sizing),
        batch=batch,
        train=sizing is not None,
        seed=seed,
        workers=workers,
        share=share or Share(),
        pin_memory=pin_memory,
    )
