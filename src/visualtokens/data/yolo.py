"""YOLO's files: a data yaml, and for every image a text file of boxes or polygons in shares of its size."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from visualtokens.data.annotations import (
    BOXES_ONLY,
    MAX_FILE_BYTES,
    MAX_OUTLINE,
    Ragged,
    boxes_as_objects,
    check_names,
    count_error,
    divide,
    files_by_name,
    is_near,
    is_too_long,
    names_of,
    raise_first,
    read_lines,
    to_mask,
    to_number,
    warn_dropped,
)
from visualtokens.data.base import SPLITS, Split, brief, check_class_count, check_split, is_inside, is_int
from visualtokens.data.decode import BadAnnotation, read_image
from visualtokens.data.detection import DetectionDataset, Objects
from visualtokens.errors import UserError
from visualtokens.progress import count as number_of
from visualtokens.yaml_files import read_yaml

IMAGES, LABELS, CLASSES = "images", "labels", "classes.txt"


class YoloObjects(DetectionDataset):
    """A data yaml with ``train``, ``val``, ``test`` and ``names``, or ``images/train`` and ``labels/train``.

    ``root`` is the yaml or its folder. Without a yaml, ``classes.txt`` has the name of each class on a line,
    and images are in ``images/train``, ``train/images`` or, if they are not divided, in ``images``. Entries
    of the yaml are folders, files that list images, or lists of them; images outside the folder of the yaml
    are refused unless ``allow_outside=True``. Other entries, such as ``download``, are ignored.

    The labels of ``images/…/a.jpg`` are in ``labels/…/a.txt``, otherwise beside the image. A line is
    ``class cx cy w h`` or ``class x1 y1 x2 y2 …`` (a polygon, which detectors with masks need). An image
    without a label file has no objects. Boxes of zero area are dropped with a warning; other boxes must
    overlap with the image, and may extend beyond it by at most its width or height, as may polygons.

    Where there is no validation split, ``val_share`` of the training images are held out. With
    ``strict=False``, an invalid label file raises when its image is read, and not on opening.
    """

    def __init__(
        self,
        root: str | Path,
        split: Split,
        *,
        masks: bool = True,
        val_share: float | None = None,
        allow_outside: bool = False,
        strict: bool = True,
    ) -> None:
        check_split(split)
        self.spec = f"yolo:{root}"
        layout = _open_layout(Path(root).expanduser(), allow_outside=allow_outside)
        self.classes = layout.classes
        self.masks = masks
        self.files = _images_of(layout, split, val_share)
        self.label_files = [_label_file(file, layout.folder) for file in self.files]
        self.bad = self._read_labels(layout)
        if strict:
            raise_first(self.bad)

    def _read_labels(self, layout: _Layout) -> dict[int, BadAnnotation]:
        """Keep the labels of all files as arrays; return the errors of invalid files."""
        bad: dict[int, BadAnnotation] = {}
        read: list[_Labels] = []
        dropped, first, missing = 0, "", 0
        for index, file in enumerate(self.label_files):
            labels = _Labels([], [], [], [])
            if not file.exists():
                missing += 1
            else:
                try:
                    labels = _parse(file, classes=len(self.classes), source=layout.source, masks=self.masks)
                except BadAnnotation as error:
                    bad[index] = error.with_traceback(None)
                if labels.dropped and not dropped:
                    first = f"{file}, line {labels.dropped[0]}"
                dropped += len(labels.dropped)
            read.append(labels)
        if missing == len(self.files):
            raise UserError(
                f"none of the {missing} images in {self.spec} has a label file; "
                f"that of {self.files[0]} would be {self.label_files[0]}"
            )
        warn_dropped(dropped, first, layout.source)
        self._labels = Ragged([np.array(r.labels, np.int64) for r in read], like=np.empty(0, np.int64))
        self._boxes = Ragged(
            [np.array(r.boxes, np.float64).reshape(-1, 4) for r in read], like=np.empty((0, 4), np.float64)
        )
        outlines = [outline for r in read for outline in r.polygons]
        self._outlines = Ragged([np.array(o, np.float64) for o in outlines], like=np.empty(0, np.float64))
        return bad

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, Objects]:
        if index in self.bad:
            raise self.bad[index].with_traceback(None)
        image = read_image(self.files[index])
        labels, boxes = self._labels[index], self._boxes[index] * np.tile(image.size, 2)
        masks = self._masks(index, image.size) if self.masks else None
        return image, boxes_as_objects(boxes, labels, masks=masks)

    def path(self, index: int) -> str:
        return str(self.files[index])

    def _masks(self, index: int, size: tuple[int, int]) -> torch.Tensor:
        width, height = size
        count = len(self._labels[index])
        _, why = count_error(count, size, masks=True)
        if why:
            raise BadAnnotation(str(self.label_files[index]), self.files[index].stem, "polygons", why)
        masks = torch.zeros(count, height, width, dtype=torch.bool)
        first = int(self._labels.ends[index]) - count  # polygon number of the first object
        for i, mask in enumerate(masks):
            pixels = self._outlines[first + i].reshape(-1, 2) * size
            mask[:] = torch.from_numpy(to_mask([pixels.ravel().tolist()], height, width))
        return masks


# Label files.


@dataclass(frozen=True)
class _Labels:
    """The objects of one file: class, box (left, top, right, bottom) and polygon, in shares of the image."""

    labels: list[int]
    boxes: list[tuple[float, float, float, float]]
    polygons: list[NDArray[np.float64]]  # empty without masks
    dropped: list[int]  # numbers of the lines with a box of zero area


def _parse(file: Path, *, classes: int, source: str, masks: bool) -> _Labels:
    """The content of a label file; the first error is raised with file, line and field."""
    try:
        lines = read_lines(file, most=MAX_FILE_BYTES)
    except UserError as error:
        raise BadAnnotation(str(file), file.stem, "file", str(error)) from error
    given = [(number, line.split()) for number, line in enumerate(lines, 1) if line.strip()]
    _, why = count_error(len(given), (0, 0), masks=False)
    if why:
        raise BadAnnotation(str(file), file.stem, "lines", why)
    found = _Labels([], [], [], [])
    for number, (first, *rest) in given:

        def wrong(field: str, why: str, number: int = number) -> BadAnnotation:
            return BadAnnotation(str(file), file.stem, f"line {number}, {field}", why)

        label = to_number(first)
        if label is None or not 0 <= label < classes or label != int(label):
            raise wrong("class", f"{brief(first)} is not a class of {source} (0 to {classes - 1})")
        values = [to_number(text) for text in rest]
        if None in values:
            raise wrong("coordinates", f"{brief(rest[values.index(None)])} is not a number")
        numbers = np.array(values, np.float64)
        if len(numbers) != 4 and (len(numbers) < 6 or len(numbers) % 2):
            why = f"{1 + len(numbers)} values; expected 'class cx cy w h', or 'class x1 y1 x2 y2 x3 y3 …'"
            raise wrong("values", why)
        if len(numbers) == 4 and masks:
            raise wrong("values", f"a box without a mask; give the points of a polygon, or {BOXES_ONLY}")
        box, field, why = _box(numbers)
        if why:
            raise wrong(field, f"{brief(' '.join(rest))} {why}")
        if box[0] == box[2] or box[1] == box[3]:
            found.dropped.append(number)
            continue
        found.labels.append(int(label))
        found.boxes.append(box)
        if masks:
            found.polygons.append(numbers)
    return found


def _box(numbers: NDArray[np.float64]) -> tuple[tuple[float, float, float, float], str, str]:
    """The box of the numbers of a line, and which field is invalid and why, if one is."""
    is_box = len(numbers) == 4
    if is_box:
        cx, cy, width, height = numbers.tolist()
        box = (cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2)
        if min(width, height) < 0:
            return box, "w and h", "is not a box: its sides are negative"
    else:
        low, high = numbers.reshape(-1, 2).min(0).tolist(), numbers.reshape(-1, 2).max(0).tolist()
        box = (*low, *high)
        points = numbers.reshape(-1, 2)
        if np.abs(np.diff(points, axis=0, append=points[:1])).sum() > MAX_OUTLINE:
            return box, "polygon", f"is more than {MAX_OUTLINE:,} times as long as the image"
    field = "cx cy w h" if is_box else "polygon"
    if numbers.min() < -1 or numbers.max() > 3:
        return box, field, "are not shares of the image (0 to 1); divide pixels by its width and height"
    if not (is_near(box[0], box[2] - box[0], 1) and is_near(box[1], box[3] - box[1], 1)):
        return box, field, "does not lie in the image, which extends from 0 to 1"
    return box, "", ""


# Layouts.


@dataclass(frozen=True)
class _Layout:
    """Where the images of each split are, and the names of the classes."""

    source: str  # what names the classes, for messages
    folder: Path  # of the dataset
    classes: list[str]
    places: Mapping[str, Sequence[str]]  # of each split: folders of images, or files that list them
    roots: Sequence[Path]  # where these are looked for
    allow_outside: bool


def _open_layout(root: Path, *, allow_outside: bool) -> _Layout:
    if not root.exists():
        raise UserError(f"{root} does not exist; give the folder of a dataset or its data.yaml")
    file = root if root.is_file() else _find_yaml(root)
    return _without_yaml(root) if file is None else _from_yaml(file, allow_outside=allow_outside)


def _find_yaml(root: Path) -> Path | None:
    if (root / "data.yaml").is_file():
        return root / "data.yaml"
    found = sorted(f for f in root.iterdir() if f.suffix in (".yaml", ".yml") and f.is_file())
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:5])
        raise UserError(f"{root} has several yaml files ({names}); name one, such as 'yolo:{found[0]}'")
    return found[0] if found else None


def _from_yaml(file: Path, *, allow_outside: bool) -> _Layout:
    content = read_yaml(file, what="data file")
    if not isinstance(content, dict):
        raise UserError(f"data file {str(file)!r} must have entries train, val and names")
    if "kpt_shape" in content:
        raise UserError(f"{file} has key points (kpt_shape); only boxes and polygons are supported")
    places: dict[str, list[str]] = {}
    for split in SPLITS:
        given: Any = next((content[name] for name in names_of(split) if content.get(name)), [])
        entries = given if isinstance(given, list) else [given]
        if not all(isinstance(entry, str) for entry in entries):
            raise UserError(f"{file}: {split} is {brief(given)}; give a folder of images or a list of them")
        if entries:
            places[split] = entries
    classes, roots = _class_names(content, file), _roots(content, file, allow_outside)
    return _Layout(str(file), file.parent, classes, places, roots, allow_outside)


def _roots(content: Mapping[str, Any], file: Path, allow_outside: bool) -> list[Path]:
    """The folders that entries of a yaml may be relative to: its ``path``, if that is there, or its own.

    ``path`` is often where the author had the dataset, such as ``../datasets/coco128``.
    """
    given = content.get("path") or "."
    if not isinstance(given, str):
        raise UserError(f"{file}: path is {brief(given)}; give the folder of the dataset")
    roots = [file.parent / given] if allow_outside or is_inside(given) else []
    return [*roots, file.parent, file.parent / Path(given).name]


def _class_names(content: Mapping[str, Any], file: Path) -> list[str]:
    names, count = content.get("names"), content.get("nc")
    if count is not None and not is_int(count):
        raise UserError(f"{file}: nc is {brief(count)}; give the number of classes")
    if names is None:
        if count is None:
            raise UserError(f"{file} has no names; add the names of the classes, such as names: [cat, dog]")
        check_class_count(count, str(file))
        return [f"class_{number}" for number in range(count)]
    if isinstance(names, dict):
        numbers = [int(key) if isinstance(key, str) and key.isdecimal() else key for key in names]
        if sorted(numbers, key=str) != sorted(range(len(names)), key=str):
            raise UserError(f"{file}: names has the numbers {brief(list(names))}; they must count from 0")
        names = [names[key] for _, key in sorted(zip(numbers, names, strict=True))]
    if not isinstance(names, list) or not all(isinstance(name, str) or is_int(name) for name in names):
        raise UserError(f"{file}: names is {brief(names)}; give a list of words, in quotes if necessary")
    if count is not None and count != len(names):
        raise UserError(
            f"{file}: nc is {count}, but names has {number_of(len(names), 'class')}; make them agree"
        )
    return check_names([str(name) for name in names], str(file))


def _without_yaml(root: Path) -> _Layout:
    listed = next((f for f in (root / CLASSES, root / LABELS / CLASSES) if f.is_file()), None)
    if listed is None:
        raise UserError(f"{root} has neither a data.yaml nor a classes.txt; one of them names the classes")
    classes = check_names([line.strip() for line in read_lines(listed) if line.strip()], str(listed))
    places: dict[str, list[str]] = {}
    for split in SPLITS:
        folders = [place for name in names_of(split) for place in (f"{IMAGES}/{name}", f"{name}/{IMAGES}")]
        found = [place for place in folders if (root / place).is_dir()]
        places |= {split: found[:1]} if found else {}
    places = places or {"train": [IMAGES if (root / IMAGES).is_dir() else "."]}
    return _Layout(str(listed), root, classes, places, [root], allow_outside=False)


def _images_of(layout: _Layout, split: Split, val_share: float | None) -> list[Path]:
    """The image files of a split."""
    if val_share is not None and "val" in layout.places:
        where = ", ".join(layout.places["val"])
        raise UserError(f"{layout.folder} has a validation split, {where}; leave val_share out")
    divided = split in ("train", "val") and "val" not in layout.places
    files: list[Path] = []
    wanted = "train" if divided else split
    if wanted not in layout.places:
        has = ", ".join(layout.places) or "none"
        raise UserError(f"{layout.folder} has no {wanted} split; of train, val and test it has: {has}")
    for entry in layout.places[wanted]:
        place = _locate(layout, entry, wanted)
        files += files_by_name(place).values() if place.is_dir() else _listed_images(layout, place)
    files = list(dict.fromkeys(files))
    if not files:
        raise UserError(f"{', '.join(layout.places[wanted])} in {layout.folder} holds no images")
    if not divided:
        return files
    names = [os.path.relpath(file, layout.folder) for file in files]
    return [files[i] for i in divide(names, split, val_share, source=str(layout.folder))]


def _locate(layout: _Layout, entry: str, split: str) -> Path:
    """The folder or file that an entry names.

    An entry such as ``../train/images``, as Roboflow writes it, means ``train/images`` if that is there.
    """
    below = entry
    while below.startswith("../"):
        below = below.removeprefix("../")
    names = [entry] if layout.allow_outside or is_inside(entry) else []
    names += [below] if is_inside(below) and below != entry else []
    candidates = list(dict.fromkeys(root / name for root in layout.roots for name in names))
    for candidate in candidates:
        if os.path.isdir(candidate) or os.path.isfile(candidate):
            return candidate
    if not names:
        raise UserError(
            f"{layout.source}: {split}: {entry!r} lies outside {layout.folder}; "
            "accept it with --data_args.allow_outside true"
        )
    tried = ", ".join(map(str, candidates))
    raise UserError(f"{layout.source}: {split}: there is no {entry!r}; looked for {tried}")


def _listed_images(layout: _Layout, listed: Path) -> list[Path]:
    files = []
    for number, line in enumerate(read_lines(listed), 1):
        name = line.strip()
        if not name:
            continue
        if not layout.allow_outside and not is_inside(name):
            raise UserError(
                f"{listed}, line {number}: {brief(name)} lies outside {listed.parent}; "
                "accept it with --data_args.allow_outside true"
            )
        if is_too_long(name):
            raise UserError(f"{listed}, line {number}: {brief(name)} is too long for the name of a file")
        files.append(listed.parent / name)
    return files


def _label_file(image: Path, folder: Path) -> Path:
    """The file with the labels of an image: ``labels/…/a.txt`` for ``images/…/a.jpg``, else beside it."""
    below = image.relative_to(folder) if image.is_relative_to(folder) else image
    parts = list(below.parts)
    for i in range(len(parts) - 2, -1, -1):
        if parts[i] == IMAGES:
            parts[i] = LABELS
            break
    return (folder / Path(*parts)).with_suffix(".txt")
