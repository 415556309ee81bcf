"""Images with objects on them: what every detection dataset is, and how one is opened by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

from visualtokens.data.base import Share, Split, generator
from visualtokens.data.batch import Key, share_from_worker
from visualtokens.data.catalog import open_dataset
from visualtokens.data.decode import BadImage
from visualtokens.data.loader import Items, Loader, load_items
from visualtokens.data.scenes import DigitScenes
from visualtokens.errors import UserError, unknown

KINDS = ("digit_scenes", "coco")


@dataclass(frozen=True, eq=False)
class Objects:
    """The n objects on one image."""

    boxes: Tensor  # (n, 4) float32: left, top, right, bottom in pixels; right - left is the width
    labels: Tensor  # (n,) int64: which of the dataset's classes
    masks: Tensor | None  # (n, H, W) bool: the visible pixels; None where nobody asked for them
    crowd: Tensor  # (n,) bool: a region of many that nobody told apart; not to be learned, nor judged
    area: Tensor  # (n,) float32: pixels, by which COCO tells small objects from large ones

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, which: Tensor) -> Objects:
        """Some of the objects, by index or by a bool for each."""
        masks = None if self.masks is None else self.masks[which]
        return Objects(self.boxes[which], self.labels[which], masks, self.crowd[which], self.area[which])

    def to(self, device: torch.device) -> Objects:
        masks = None if self.masks is None else self.masks.to(device, non_blocking=True)
        return replace(
            self,
            boxes=self.boxes.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            masks=masks,
        )

    def tensors(self) -> list[Tensor]:
        masks = [] if self.masks is None else [self.masks]
        return [self.boxes, self.labels, self.crowd, self.area, *masks]


class DetectionDataset(Dataset[tuple[Image.Image, Objects]], ABC):
    """RGB images, each with its objects, possibly none. One that cannot be read raises ``BadImage``."""

    classes: list[str]
    spec: str  # what `open_detection` makes it from

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> tuple[Image.Image, Objects]: ...

    @abstractmethod
    def path(self, index: int) -> str:
        """How to name an item to a person: a file, or a row such as ``digit_scenes/val[17]``."""


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


def open_detection(spec: str, split: Split, *, masks: bool = True, seed: int = 0) -> DetectionDataset:
    """The detection dataset that ``spec`` names.

    ======================  =================================================================
    ``digit_scenes``        handwritten digits on cluttered canvases of 128×128
    ``digit_scenes:96x160`` the same, 96 high and 160 wide
    ``coco:/path``          COCO's layout, see :class:`~visualtokens.data.coco.CocoObjects`
    ======================  =================================================================

    ``masks=False`` leaves the masks out, for a detector of boxes. ``seed`` decides which scenes
    ``digit_scenes`` makes.
    """
    kind, _, rest = spec.partition(":")
    if kind == "digit_scenes":
        return SceneObjects(cast(DigitScenes, open_dataset(spec, split, seed=seed)), masks=masks)
    if kind == "coco":
        from visualtokens.data.coco import CocoObjects

        if not rest:
            raise UserError(f"{spec!r} names no path; write 'coco:/path'")
        return CocoObjects(rest, split, masks=masks)
    raise unknown("detection dataset", kind, KINDS)


# What a loader of detection images hands out.


@dataclass(frozen=True, eq=False)
class DetectionItem:
    """One image on its way into a batch."""

    image: Tensor
    objects: Objects
    index: int


@dataclass(frozen=True, eq=False)
class DetectionBatch:
    """The readable images of a batch, possibly none, each of its own size, and what was wrong with others."""

    images: tuple[Tensor, ...]  # (3, H, W) uint8
    objects: tuple[Objects, ...]
    index: Tensor  # (B,) int64: the item of the dataset
    bad: tuple[BadImage, ...]

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device, *, memory_format: torch.memory_format) -> DetectionBatch:
        """Images, boxes, labels and masks on the device; the detector decides the order of its own batch."""
        return replace(
            self,
            images=tuple(image.to(device, non_blocking=True) for image in self.images),
            objects=tuple(each.to(device) for each in self.objects),
        )

    def split(self, parts: int) -> list[DetectionBatch]:
        """Divide the images into several batches; the first one takes ``bad`` along."""
        if parts == 1:
            return [self]
        pieces = []
        for part in range(parts):
            places = Share(part, parts).of(len(self)).tolist()
            pieces.append(
                DetectionBatch(
                    tuple(self.images[i] for i in places),
                    tuple(self.objects[i] for i in places),
                    self.index[places],
                    () if part else self.bad,
                )
            )
        return pieces

    def pin_memory(self) -> DetectionBatch:
        """In memory from which a GPU copies without waiting; ``DataLoader`` asks for it."""
        return replace(self, images=tuple(image.pin_memory() for image in self.images))


def collate(items: list[DetectionItem | BadImage]) -> DetectionBatch:
    """Makes one batch of items and of what could not be read."""
    good = [item for item in items if isinstance(item, DetectionItem)]
    batch = DetectionBatch(
        tuple(item.image for item in good),
        tuple(item.objects for item in good),
        torch.tensor([item.index for item in good], dtype=torch.int64),
        tuple(item for item in items if isinstance(item, BadImage)),
    )
    share_from_worker((*batch.images, *(t for each in batch.objects for t in each.tensors()), batch.index))
    return batch


# Batches of images with objects.


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

    To train, images come shuffled and changed as ``sizing`` says, each by random numbers that depend on
    ``seed``, epoch and item only, with the objects that can be learned. To judge, ``sizing=None``: in
    order, unchanged, with all objects. An image that cannot be read, or whose annotation cannot be used,
    is listed in ``bad`` and not replaced.
    """
    return load_items(
        _Items(dataset, sizing, seed),
        collate,
        count=len(dataset),
        batch=batch,
        train=sizing is not None,
        seed=seed,
        workers=workers,
        share=share or Share(),
        pin_memory=pin_memory,
    )


@dataclass(frozen=True, eq=False)
class _Items(Items[DetectionItem]):
    dataset: DetectionDataset
    sizing: Sizing | None
    seed: int

    def make(self, key: Key) -> DetectionItem:
        image, objects = self.dataset[key.index]
        if self.sizing is None:
            return DetectionItem(*as_is(image, objects), key.index)
        rng = generator(self.seed, key.epoch, key.index)
        return DetectionItem(*self.sizing(image, objects, rng), key.index)


# Image and objects changed together: resized, mirrored, cut to what can be learned.

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
