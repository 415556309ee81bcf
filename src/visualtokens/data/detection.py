"""Images with objects on them: what every detection dataset is, and how one is opened by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import cast

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from visualtokens.data.base import Split
from visualtokens.data.catalog import open_dataset
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
