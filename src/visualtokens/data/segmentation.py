"""Datasets of images with a class per pixel, by the name a command line gives them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from visualtokens.data.base import Split, check_split
from visualtokens.data.catalog import open_dataset
from visualtokens.data.decode import EXTENSIONS, read_image
from visualtokens.data.scenes import DigitScenes
from visualtokens.data.segmentation_transforms import EXTENSIONS as MASK_EXTENSIONS
from visualtokens.data.segmentation_transforms import IGNORE, BadAnnotation, Mask, read_mask, renumber
from visualtokens.errors import UserError, unknown

# What the classes of the public segmentation datasets are called, in the order of their numbers.

PETS = ("pet", "background", "border")

LIP = (
    *("background", "hat", "hair", "glove", "sunglasses", "upper clothes", "dress", "coat", "socks", "pants"),
    *("jumpsuits", "scarf", "skirt", "face", "left arm", "right arm", "left leg", "right leg"),
    *("left shoe", "right shoe"),
)

# The 91 classes of stuff, whose numbers in COCO are 92 to 182.
COCO_STUFF = (
    *("banner", "blanket", "branch", "bridge", "building-other", "bush", "cabinet", "cage", "cardboard"),
    *("carpet", "ceiling-other", "ceiling-tile", "cloth", "clothes", "clouds", "counter", "cupboard"),
    *("curtain", "desk-stuff", "dirt", "door-stuff", "fence", "floor-marble", "floor-other", "floor-stone"),
    *("floor-tile", "floor-wood", "flower", "fog", "food-other", "fruit", "furniture-other", "grass"),
    *("gravel", "ground-other", "hill", "house", "leaves", "light", "mat", "metal", "mirror-stuff", "moss"),
    *("mountain", "mud", "napkin", "net", "paper", "pavement", "pillow", "plant-other", "plastic"),
    *("platform", "playingfield", "railing", "railroad", "river", "road", "rock", "roof", "rug", "salad"),
    *("sand", "sea", "shelf", "sky-other", "skyscraper", "snow", "solid-other", "stairs", "stone", "straw"),
    *("structural-other", "table", "tent", "textile-other", "towel", "tree", "vegetable", "wall-brick"),
    *("wall-concrete", "wall-other", "wall-panel", "wall-stone", "wall-tile", "wall-wood", "water-other"),
    *("waterdrops", "window-blind", "window-other", "wood"),
)

ADE20K = (
    *("wall", "building", "sky", "floor", "tree", "ceiling", "road", "bed", "windowpane", "grass", "cabinet"),
    *("sidewalk", "person", "earth", "door", "table", "mountain", "plant", "curtain", "chair", "car"),
    *("water", "painting", "sofa", "shelf", "house", "sea", "mirror", "rug", "field", "armchair", "seat"),
    *("fence", "desk", "rock", "wardrobe", "lamp", "bathtub", "railing", "cushion", "base", "box", "column"),
    *("signboard", "chest of drawers", "counter", "sand", "sink", "skyscraper", "fireplace", "refrigerator"),
    *("grandstand", "path", "stairs", "runway", "case", "pool table", "pillow", "screen door", "stairway"),
    *("river", "bridge", "bookcase", "blind", "coffee table", "toilet", "flower", "book", "hill", "bench"),
    *("countertop", "stove", "palm", "kitchen island", "computer", "swivel chair", "boat", "bar"),
    *("arcade machine", "hovel", "bus", "towel", "light", "truck", "tower", "chandelier", "awning"),
    *("streetlight", "booth", "television receiver", "airplane", "dirt track", "apparel", "pole", "land"),
    *("bannister", "escalator", "ottoman", "bottle", "buffet", "poster", "stage", "van", "ship", "fountain"),
    *("conveyer belt", "canopy", "washer", "plaything", "swimming pool", "stool", "barrel", "basket"),
    *("waterfall", "tent", "bag", "minibike", "cradle", "oven", "ball", "food", "step", "tank"),
    *("trade name", "microwave", "pot", "animal", "bicycle", "lake", "dishwasher", "screen", "blanket"),
    *("sculpture", "hood", "sconce", "vase", "traffic light", "tray", "ashcan", "fan", "pier", "crt screen"),
    *("plate", "monitor", "bulletin board", "shower", "radiator", "glass", "clock", "flag"),
)


# Where the datasets of segmentation keep their images and masks, and what the numbers in a mask mean.

Table = NDArray[np.int16]


@dataclass(frozen=True)
class Files:
    """One image and its mask; ``id`` is the path of both inside their folders, without extension."""

    id: str
    image: str
    mask: str


@dataclass(frozen=True, eq=False)
class Layout:
    """A dataset on disk."""

    classes: Sequence[str]
    files: list[Files]
    table: Table  # the class of every number in a mask, 255 for none, -1 for numbers that may not occur
    keep_ratio: bool = True  # whether images are seen in their own shape, not stretched to the model's


def masks(root: Path, split: Split) -> Layout:
    """``images/<split>/**.jpg``, ``masks/<split>/**.png``, and ``classes.txt`` with a name per line.

    An image and its mask have the same name. A number in a mask is that of a line, from 0; 255 is ignored.
    """
    listed = root / "classes.txt"
    if not listed.is_file():
        raise UserError(f"{listed} does not exist; write the name of each class on a line of its own")
    classes = [line.strip() for line in listed.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not 1 <= len(classes) <= IGNORE:
        raise UserError(f"{listed} names {len(classes)} classes; give from 1 to {IGNORE}")
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if classes.count(name) > 1)
        raise UserError(f"{listed} names the class {twice!r} twice")
    files = _pairs(_folder(root, f"images/{split}"), _folder(root, f"masks/{split}"))
    return Layout(classes, files, _table(len(classes)))


def pets(root: Path, split: Split) -> Layout:
    """``<split>/<breed>/*.jpg`` with ``trimaps/<split>/<breed>/*.png``, or as it is published.

    Published are ``images``, ``annotations/trimaps`` and the lists ``trainval.txt`` and ``test.txt``.
    """
    table = _table(3, first=1, ignore=())
    if (root / "annotations").is_dir():
        files = _pairs(_folder(root, "images"), _folder(root, "annotations/trimaps"), every_image=False)
        wanted = _names(root / "annotations" / ("trainval.txt" if split == "train" else "test.txt"))
        files = [file for file in files if file.id in wanted]
    else:
        files = _pairs(_folder(root, split), _folder(root, f"trimaps/{split}"))
    return Layout(PETS, _some(files, root), table)


def ade20k(root: Path, split: Split) -> Layout:
    """``images/training`` and ``annotations/training``, likewise ``validation``; 0 is ignored."""
    name = {"train": "training", "val": "validation"}[split]
    files = _pairs(_folder(root, f"images/{name}"), _folder(root, f"annotations/{name}"))
    return Layout(ADE20K, files, _table(len(ADE20K), first=1, ignore=(0,)))


def cocostuff(root: Path, split: Split) -> Layout:
    """``train2017`` (or ``images/train2017``) with ``stuffthingmaps/train2017`` (or ``annotations/…``).

    A map holds COCO's number of the class less one: 0 to 90 for things, 91 to 181 for stuff, 255 for none.
    """
    year = f"{split}2017"
    images = _folder(root, year, f"images/{year}")
    maps = _folder(root, f"stuffthingmaps/{year}", f"annotations/{year}")
    return Layout(COCO_STUFF, _pairs(images, maps), _table(91, first=91, ignore=(*range(91), IGNORE)))


def lip(root: Path, split: Split) -> Layout:
    """``train_images`` and ``train_segmentations``, alone or inside the folders they are published in.

    Each image is cut around one person; models see it stretched to a square.
    """
    images = _folder(root, *_nested("TrainVal_images", f"{split}_images"))
    parts = _folder(root, *_nested("TrainVal_parsing_annotations", f"{split}_segmentations"))
    return Layout(LIP, _pairs(images, parts), _table(len(LIP)), keep_ratio=False)


LAYOUTS: Mapping[str, Callable[[Path, Split], Layout]] = {
    "masks": masks,
    "pets": pets,
    "ade20k": ade20k,
    "cocostuff": cocostuff,
    "lip": lip,
}


def _table(classes: int, *, first: int = 0, ignore: Sequence[int] = (IGNORE,)) -> Table:
    table = np.full(256, -1, np.int16)
    table[list(ignore)] = IGNORE
    table[first : first + classes] = np.arange(classes)
    return table


def _folder(root: Path, *places: str) -> Path:
    """The first of the places that exists."""
    for place in places:
        if (root / place).is_dir():
            return root / place
    raise UserError(f"{root} has no folder {' or '.join(places)}")


def _nested(outer: str, name: str) -> tuple[str, ...]:
    return name, f"{outer}/{name}", f"{outer}/{outer}/{name}"


def _pairs(images: Path, masks: Path, *, every_image: bool = True) -> list[Files]:
    """The images with their masks, sorted, so that a number means the same on every machine."""
    found, marked = _files(images, EXTENSIONS), _files(masks, MASK_EXTENSIONS)
    without = sorted(set(found) - set(marked))
    if without and every_image:
        raise UserError(
            f"{len(without)} of {len(found)} images in {images} have no mask in {masks}, "
            f"such as {found[without[0]]}; add {masks / without[0]}.png or remove the image"
        )
    return _some([Files(id, found[id], marked[id]) for id in sorted(set(found) & set(marked))], images)


def _some(files: list[Files], folder: Path) -> list[Files]:
    if not files:
        raise UserError(f"{folder} holds no images with masks")
    return files


def _files(folder: Path, extensions: frozenset[str]) -> dict[str, str]:
    """The files below a folder by their path in it without extension."""
    found: dict[str, str] = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            stem, extension = os.path.splitext(name)
            if extension.lower() not in extensions or name.startswith("."):
                continue
            path = os.path.join(parent, name)
            id = os.path.relpath(os.path.join(parent, stem), folder)
            if id in found:
                raise UserError(f"{path} and {found[id]} have the same name; rename one of them")
            found[id] = path
    return found


def _names(listed: Path) -> set[str]:
    """The first word of every line."""
    if not listed.is_file():
        raise UserError(f"{listed} does not exist; it lists the images of the split")
    lines = listed.read_text(encoding="utf-8").splitlines()
    return {line.split()[0] for line in lines if line.strip() and not line.startswith("#")}


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
