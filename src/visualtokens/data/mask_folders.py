"""Segmentation datasets on disk: folders of images and masks, in the layouts of the public datasets."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visualtokens.data.base import SPLITS, Split, check_split
from visualtokens.data.decode import EXTENSIONS, MASK_EXTENSIONS, BadAnnotation, read_image, read_mask
from visualtokens.data.folder import Walk
from visualtokens.data.segmentation import IGNORE, Mask, SegmentationDataset
from visualtokens.errors import UserError

Table = NDArray[np.int16]  # (256,): class of every number in a mask file; -1 where the number is invalid


class Pair(NamedTuple):
    """An image file and its mask; ``id`` is the path of both inside their folders, without extension."""

    id: str
    image: str
    mask: str


@dataclass(frozen=True, eq=False)
class Layout:
    """The files of one split, and the meaning of the numbers in its masks."""

    classes: Sequence[str]
    pairs: list[Pair]
    table: Table
    keep_ratio: bool = True


class MaskFolder(SegmentationDataset):
    """Image files, each with a mask file of class numbers; ``kind`` is one of :data:`LAYOUTS`.

    Links are followed as in :class:`~visualtokens.data.folder.ImageFolder`.
    """

    def __init__(self, kind: str, root: str | Path, split: Split) -> None:
        check_split(split, source=f"{kind}:{root}", has=("train", "val") if kind in NO_TEST else SPLITS)
        base = Path(root).expanduser()
        if not base.is_dir():
            raise UserError(f"{base} {'is a file, not a folder' if base.exists() else 'does not exist'}")
        layout = LAYOUTS[kind](base, split)
        self.spec = f"{kind}:{root}"
        self.classes = list(layout.classes)
        self.pairs = layout.pairs
        self.table = layout.table
        self.keep_ratio = layout.keep_ratio

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Image.Image, Mask]:
        pair = self.pairs[index]
        image = read_image(pair.image)
        values = read_mask(pair.mask, image_id=pair.id)
        height, width = values.shape
        if image.size != (width, height):
            why = f"{width}×{height}, but {pair.image} is {image.width}×{image.height}"
            raise BadAnnotation(pair.mask, pair.id, "size", why)
        return image, to_classes(values, self.table, path=pair.mask, image_id=pair.id)

    def path(self, index: int) -> str:
        return self.pairs[index].image


def to_classes(values: NDArray[np.integer], table: Table, *, path: str, image_id: str) -> Mask:
    """The class ``table[value]`` of every pixel of ``values (H, W)``; an invalid number raises."""
    inside = (values >= 0) & (values < len(table))
    classes = np.where(inside, table[np.where(inside, values, 0)], -1)
    if (classes < 0).any():
        row, column = np.argwhere(classes < 0)[0].tolist()
        valid = np.flatnonzero(table >= 0)
        why = (
            f"{values[row, column]} at row {row}, column {column} is not a number of this dataset "
            f"({_ranges(valid.tolist())})"
        )
        raise BadAnnotation(path, image_id, "pixels", why)
    return classes.astype(np.uint8)


def _ranges(numbers: list[int]) -> str:
    """Sorted numbers as text, such as ``0 to 20, 255``."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in ranges)


def masks(root: Path, split: Split) -> Layout:
    """``images/<split>/**.jpg``, ``masks/<split>/**.png``, and ``classes.txt`` with one name per line.

    An image and its mask have the same name. Numbers in a mask are line numbers, from 0; 255 is ignored.
    """
    listed = root / "classes.txt"
    if not listed.is_file():
        raise UserError(f"{listed} does not exist; write the name of each class on a line of its own")
    classes = [line.strip() for line in _lines(listed) if line.strip()]
    if not 1 <= len(classes) <= IGNORE:
        raise UserError(f"{listed} names {len(classes)} classes; give from 1 to {IGNORE}")
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if classes.count(name) > 1)
        raise UserError(f"{listed} names the class {twice!r} twice")
    pairs = _pairs(_folder(root, f"images/{split}"), _folder(root, f"masks/{split}"))
    return Layout(classes, pairs, _table(len(classes)))


def pets(root: Path, split: Split) -> Layout:
    """``<split>/<breed>/*.jpg`` and ``trimaps/<split>/<breed>/*.png``, or the published layout.

    The published one has ``images``, ``annotations/trimaps`` and the lists ``trainval.txt`` and ``test.txt``.
    """
    if (root / "annotations").is_dir():
        pairs = _pairs(_folder(root, "images"), _folder(root, "annotations/trimaps"), every_image=False)
        listed = _listed_names(root / "annotations" / ("trainval.txt" if split == "train" else "test.txt"))
        pairs = _not_empty([pair for pair in pairs if pair.id in listed], root)
    else:
        pairs = _pairs(_folder(root, split), _folder(root, f"trimaps/{split}"))
    return Layout(PETS, pairs, _table(3, first=1, ignore=()))


def ade20k(root: Path, split: Split) -> Layout:
    """``images/training`` and ``annotations/training``, likewise ``validation``; 0 is ignored."""
    name = {"train": "training", "val": "validation"}[split]
    pairs = _pairs(_folder(root, f"images/{name}"), _folder(root, f"annotations/{name}"))
    return Layout(ADE20K, pairs, _table(len(ADE20K), first=1, ignore=(0,)))


def cocostuff(root: Path, split: Split) -> Layout:
    """``train2017`` (or ``images/train2017``) with ``stuffthingmaps/train2017`` (or ``annotations/…``).

    Masks hold COCO's category numbers minus one: 0 to 90 are things, 91 to 181 stuff, 255 is unlabelled.
    """
    year = f"{split}2017"
    images = _folder(root, year, f"images/{year}")
    maps = _folder(root, f"stuffthingmaps/{year}", f"annotations/{year}")
    return Layout(COCO_STUFF, _pairs(images, maps), _table(91, first=91, ignore=(*range(91), IGNORE)))


def lip(root: Path, split: Split) -> Layout:
    """``train_images`` and ``train_segmentations``, at the top or nested as in the published archives.

    Each image is cropped around one person; models see it stretched to a square.
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
NO_TEST = ("ade20k", "cocostuff", "lip")  # the masks of their test images are not public


def _table(classes: int, *, first: int = 0, ignore: Sequence[int] = (IGNORE,)) -> Table:
    table = np.full(256, -1, np.int16)
    table[list(ignore)] = IGNORE
    table[first : first + classes] = np.arange(classes)
    return table


def _folder(root: Path, *candidates: str) -> Path:
    """The first candidate that exists."""
    for candidate in candidates:
        if (root / candidate).is_dir():
            return root / candidate
    raise UserError(f"{root} has no folder {' or '.join(candidates)}")


def _nested(outer: str, name: str) -> tuple[str, ...]:
    return name, f"{outer}/{name}", f"{outer}/{outer}/{name}"


def _pairs(images: Path, masks: Path, *, every_image: bool = True) -> list[Pair]:
    """The images with their masks, sorted, so that an index means the same on every machine."""
    image_of, mask_of = _files(images, EXTENSIONS), _files(masks, MASK_EXTENSIONS)
    missing = sorted(set(image_of) - set(mask_of))
    if missing and every_image:
        raise UserError(
            f"{len(missing)} of {len(image_of)} images in {images} have no mask in {masks}, "
            f"such as {image_of[missing[0]]}; add {masks / missing[0]}.png or remove the image"
        )
    common = sorted(set(image_of) & set(mask_of))
    return _not_empty([Pair(id, image_of[id], mask_of[id]) for id in common], images)


def _not_empty(pairs: list[Pair], folder: Path) -> list[Pair]:
    if not pairs:
        raise UserError(f"{folder} holds no images with masks")
    return pairs


def _files(folder: Path, extensions: frozenset[str]) -> dict[str, str]:
    """The files below a folder, by their path inside it without extension."""
    found: dict[str, str] = {}
    for parent, names in Walk(folder)():
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


def _listed_names(listed: Path) -> set[str]:
    """The first word of every line."""
    if not listed.is_file():
        raise UserError(f"{listed} does not exist; it lists the images of the split")
    return {line.split()[0] for line in _lines(listed) if line.strip() and not line.startswith("#")}


def _lines(file: Path) -> list[str]:
    """The lines of a text file; bytes that are not UTF-8 are decoded as in file names."""
    return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()


# Class names, in the order of their numbers.

PETS = ("pet", "background", "border")

LIP = (
    *("background", "hat", "hair", "glove", "sunglasses", "upper clothes", "dress", "coat", "socks", "pants"),
    *("jumpsuits", "scarf", "skirt", "face", "left arm", "right arm", "left leg", "right leg"),
    *("left shoe", "right shoe"),
)

# The 91 stuff classes, numbers 92 to 182 in COCO.
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
