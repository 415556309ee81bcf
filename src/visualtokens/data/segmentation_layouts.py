"""Where the datasets of segmentation keep their images and masks, and what the numbers in a mask mean."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from visualtokens.data.base import Split
from visualtokens.data.class_names import ADE20K, COCO_STUFF, LIP, PETS
from visualtokens.data.decode import EXTENSIONS
from visualtokens.data.masks import EXTENSIONS as MASK_EXTENSIONS
from visualtokens.data.masks import IGNORE
from visualtokens.errors import UserError

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
