"""Datasets of images with a class per pixel, by the name a command line gives them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from visualtokens.data.base import Split, check_split
from visualtokens.data.catalog import open_dataset
from visualtokens.data.decode import read_image
from visualtokens.data.masks import BadAnnotation, Mask, read_mask, renumber
from visualtokens.data.scenes import DigitScenes
from visualtokens.data.segmentation_layouts import LAYOUTS, Layout
from visualtokens.errors import UserError, unknown

KINDS = ("digit_scenes", *LAYOUTS)


class SegmentationDataset(Dataset[tuple[Image.Image, Mask]], ABC):
    """RGB images with the class of every pixel, ``(H, W)`` uint8; 255 where there is none.

    An item that cannot be read raises ``BadImage``, or ``BadAnnotation`` if its mask is at fault.
    """

    classes: list[str]
    spec: str  # what `open_segmentation` makes it from
    keep_ratio: bool = True  # whether models see images in their own shape, not stretched to their size

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> tuple[Image.Image, Mask]: ...

    @abstractmethod
    def path(self, index: int) -> str:
        """How to name an item to a person: a file, or a number such as ``digit_scenes[17]``."""


class MaskFiles(SegmentationDataset):
    """Image files and beside each a file whose pixels are numbers of classes."""

    def __init__(self, layout: Layout, *, spec: str) -> None:
        self.spec = spec
        self.classes = list(layout.classes)
        self.files = layout.files
        self.table = layout.table
        self.keep_ratio = layout.keep_ratio

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, Mask]:
        file = self.files[index]
        image = read_image(file.image)
        values = read_mask(file.mask, image_id=file.id)
        height, width = values.shape
        if image.size != (width, height):
            why = f"{width}×{height}, but {file.image} is {image.width}×{image.height}"
            raise BadAnnotation(file.mask, file.id, "size", why)
        return image, renumber(values, self.table, path=file.mask, image_id=file.id)

    def path(self, index: int) -> str:
        return self.files[index].image


class SceneMasks(SegmentationDataset):
    """The embedded scenes of digits: background, and a class for each digit."""

    def __init__(self, scenes: DigitScenes) -> None:
        self.spec = scenes.spec
        self.classes = ["background", *scenes.classes]
        self.scenes = scenes

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> tuple[Image.Image, Mask]:
        scene = self.scenes.scene(index)
        return scene.image, scene.semantic.numpy().astype(np.uint8)

    def path(self, index: int) -> str:
        return self.scenes.path(index)


def open_segmentation(spec: str, split: Split, *, seed: int = 0) -> SegmentationDataset:
    """The dataset that ``spec`` names.

    ======================  ==================================================================
    ``digit_scenes``        digits on cluttered canvases of 128×128, embedded
    ``digit_scenes:96x160`` the same, 96 high and 160 wide
    ``masks:/path``         ``images/train/*.jpg``, ``masks/train/*.png``, ``classes.txt``
    ``pets:/path``          Oxford-IIIT Pet with its trimaps: pet, background, border
    ``ade20k:/path``        ``ADEChallengeData2016``: ``images/training``, ``annotations/…``
    ``cocostuff:/path``     ``train2017`` and its maps of stuff; things are ignored
    ``lip:/path``           Look Into Person: ``train_images``, ``train_segmentations``
    ======================  ==================================================================

    Of each also the validation part. ``seed`` decides which scenes ``digit_scenes`` makes; nothing in the
    other datasets is random.
    """
    check_split(split)
    kind, _, rest = spec.partition(":")
    if kind == "digit_scenes":
        return SceneMasks(cast(DigitScenes, open_dataset(spec, split, seed=seed)))
    if kind not in LAYOUTS:
        raise unknown("segmentation dataset", kind, KINDS)
    if not rest:
        raise UserError(f"{spec!r} names no path; write '{kind}:/path'")
    root = Path(rest).expanduser()
    if not root.is_dir():
        raise UserError(f"{root} {'is a file, not a folder' if root.exists() else 'does not exist'}")
    return MaskFiles(LAYOUTS[kind](root, split), spec=spec)


def mirrored_classes(classes: Sequence[str]) -> list[int]:
    """Which class each one is in a mirror: a left arm is a right arm there, most are themselves."""
    numbers = {name: i for i, name in enumerate(classes)}
    return [numbers.get(_other_side(name), i) for i, name in enumerate(classes)]


def _other_side(name: str) -> str:
    words = {"left": "right", "right": "left", "Left": "Right", "Right": "Left"}
    for word, other in words.items():
        if name.startswith(word) and not name[len(word) : len(word) + 1].islower():
            return other + name[len(word) :]
    return name
