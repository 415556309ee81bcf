"""COCO annotation files: a detection dataset, and validation of the files."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from visualtokens.data.annotations import (
    BOXES_ONLY,
    MAX_OUTLINE,
    MAX_POLYGONS,
    box_error,
    count_error,
    divide,
    is_finite,
    names_of,
    outline_length,
    polygon_error,
    raise_first,
    to_mask,
    warn_dropped,
)
from visualtokens.data.base import SPLITS, Split, brief, check_class_count, check_split, is_inside, is_int
from visualtokens.data.decode import BadAnnotation, BadImage, max_pixels, read_image
from visualtokens.data.detection import DetectionDataset, Objects
from visualtokens.errors import UserError

# Where the files of a split are looked for, under all of its names.
ANNOTATIONS = (
    "annotations/instances_{split}2017.json",
    "annotations/instances_{split}.json",
    "annotations/{split}.json",
    "{split}/_annotations.coco.json",
)
IMAGES = ("{split}2017", "{split}", "images/{split}2017", "images/{split}", "images")
IMAGES_OF_ALL = ("images", "data", ".")  # if one annotation file holds all splits


class CocoObjects(DetectionDataset):
    """``/path/annotations/instances_train2017.json`` and the images in ``/path/train2017``; val likewise.

    The 2017 in the names is optional, and the image folders may be in ``/path/images``; the layout of
    Roboflow, ``train/_annotations.coco.json`` with the images beside it, is found as well. Masks are polygons
    or run lengths, compressed or not. The annotation file is validated on opening; errors name file, image
    and field. Boxes of zero area are dropped with a warning; other boxes must overlap with the image, and may
    extend beyond it by at most its width or height, as may polygons. ``classes`` and ``ids`` (the image ids)
    are in the order of the file.

    ``annotations`` and ``images`` name a file and a folder, in the dataset's folder or elsewhere; ``{split}``
    in them becomes train, val or test. Without it, the file holds all images, of which ``val_share`` are held
    out for validation. ``val_share`` also divides the training file where there is none for validation.
    A ``file_name`` must lie in the folder of the images, unless ``allow_outside=True``. With
    ``strict=False``, an invalid annotation raises when its image is read, and not on opening.
    """

    def __init__(
        self,
        root: str | Path,
        split: Split,
        *,
        masks: bool = True,
        annotations: str | None = None,
        images: str | None = None,
        val_share: float | None = None,
        allow_outside: bool = False,
        strict: bool = True,
    ) -> None:
        check_split(split)
        base = Path(root).expanduser()
        self.spec = f"coco:{root}"
        if base.suffix == ".json" and base.is_file() and annotations is None:
            base, annotations = base.parent, base.name
        self.file, divided = _find_file(base, split, annotations, val_share)
        document = _read_json(self.file)
        records = parse_records(document, str(self.file), masks=masks, allow_outside=allow_outside)
        if strict:
            raise_first(records.bad)
        kept = list(records.images.values())
        if not kept:
            raise UserError(f"{self.file} holds no images")
        self.folder = _find_images(base, split, images, kept[0]["file_name"], divided=divided)
        if divided:
            names = [image["file_name"] for image in kept]
            kept = [kept[i] for i in divide(names, split, val_share, source=str(self.file))]
        self.classes = list(records.categories.values())
        self.masks = masks
        self.ids = [image["id"] for image in kept]
        self.bad = {i: records.bad[image] for i, image in enumerate(self.ids) if image in records.bad}
        self._names = [image["file_name"] for image in kept]
        self._sizes = np.array([(image["height"], image["width"]) for image in kept])  # (images, 2)
        self._annotations = _Annotations(records, str(self.file))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Image.Image, Objects]:
        if index in self.bad:
            raise self.bad[index].with_traceback(None)
        image = read_image(self.path(index))
        height, width = self._sizes[index].tolist()
        if image.size != (width, height):
            annotated = f"{self.file} has {width}×{height} in 'width' and 'height' of image {self.ids[index]}"
            raise BadImage(self.path(index), f"is {image.width}×{image.height}, but {annotated}")
        return image, self._objects(index)

    def path(self, index: int) -> str:
        return str(self.folder / self._names[index])

    def _objects(self, index: int) -> Objects:
        rows = self._annotations.of_image(self.ids[index])  # (n,)
        height, width = self._sizes[index].tolist()
        masks = None
        if self.masks:
            masks = torch.zeros(len(rows), height, width, dtype=torch.bool)
            for mask, row in zip(masks, rows.tolist(), strict=True):
                mask[:] = torch.from_numpy(self._mask(index, row, height, width))
        boxes = self._annotations.boxes[rows]  # (n, 4): left, top, width, height
        corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
        return Objects(
            torch.from_numpy(corners.astype(np.float32)),
            torch.from_numpy(self._annotations.labels[rows]),
            masks,
            torch.from_numpy(self._annotations.crowd[rows]),
            torch.from_numpy(self._annotations.area[rows].astype(np.float32)),
        )

    def _mask(self, index: int, row: int, height: int, width: int) -> NDArray[np.bool_]:
        try:
            return to_mask(self._annotations.segmentation(row), height, width)
        except ValueError as error:
            why = f"{error} (annotation {self._annotations.ids[row]})"
            raise BadAnnotation(str(self.file), str(self.ids[index]), "segmentation", why) from error


class _Annotations:
    """All annotations of a file as a few arrays, which forked workers share; dicts would be copied."""

    def __init__(self, records: Records, file: str) -> None:
        kept = [a for a in records.annotations if a["bbox"][2] > 0 and a["bbox"][3] > 0]
        dropped = [a for a in records.annotations if a["bbox"][2] == 0 or a["bbox"][3] == 0]
        if dropped:
            warn_dropped(len(dropped), f"image {dropped[0]['image_id']}", file)
        label_of = {category: label for label, category in enumerate(records.categories)}
        self.ids = np.array([brief(a.get("id")) for a in kept], np.str_)
        self.boxes = np.array([a["bbox"] for a in kept], np.float64).reshape(-1, 4)
        self.labels = np.array([label_of[a["category_id"]] for a in kept], np.int64)
        self.crowd = np.array([a.get("iscrowd", 0) for a in kept], np.bool_)
        self.area = np.array([a.get("area", a["bbox"][2] * a["bbox"][3]) for a in kept], np.float64)
        images = np.array([a["image_id"] for a in kept], np.int64)
        self._order = np.argsort(images, kind="stable")
        self._sorted_images = images[self._order]
        texts = [json.dumps(a.get("segmentation")).encode() for a in kept]
        self._text_ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        self._text = np.frombuffer(b"".join(texts), np.uint8)

    def of_image(self, image: int) -> NDArray[np.int64]:
        """The rows of the annotations of an image."""
        begin = np.searchsorted(self._sorted_images, image, "left")
        end = np.searchsorted(self._sorted_images, image, "right")
        return self._order[begin:end]

    def segmentation(self, row: int) -> Any:
        """The segmentation of one annotation, as in the file."""
        begin = self._text_ends[row - 1] if row else 0
        return json.loads(self._text[begin : self._text_ends[row]].tobytes())


def _find_file(
    base: Path, split: Split, annotations: str | None, val_share: float | None
) -> tuple[Path, bool]:
    """The annotation file of a split, and whether it also holds the images of another."""
    if annotations is not None and "{split}" not in annotations:
        return _find(base, (annotations,), split, folder=False), True
    patterns = ANNOTATIONS if annotations is None else (annotations,)
    if val_share is None or split == "test":
        return _find(base, patterns, split, folder=False), False
    for candidate in _candidates(base, patterns, "val"):
        if candidate.is_file():
            raise UserError(f"{base} has a validation split, {candidate}; leave val_share out")
    return _find(base, patterns, "train", folder=False), True


def _find_images(base: Path, split: Split, images: str | None, first: str, *, divided: bool) -> Path:
    """The folder of the images, of which ``first`` is one; those of all splits if ``divided``."""
    if images is None and divided:
        for name in IMAGES_OF_ALL:
            if (base / name / first).is_file():
                return base / name
    return _find(base, IMAGES if images is None else (images,), "train" if divided else split, folder=True)


def _find(base: Path, patterns: Sequence[str], split: Split, *, folder: bool) -> Path:
    candidates = _candidates(base, patterns, split)
    for candidate in candidates:
        if candidate.is_dir() if folder else candidate.is_file():
            return candidate
    tried = ", ".join(os.path.relpath(c, base) for c in candidates[: len(patterns)])
    what, option = ("folder of images", "images") if folder else ("annotation file", "annotations")
    others = [s for s in SPLITS if any(c.exists() for c in _candidates(base, patterns, s))]
    only = f", only for {', '.join(others)}" if others else ""
    hint = f"name another with --data_args.{option}"
    if split == "val" and not folder:
        hint += ", or hold out training images with --val_share 0.2"
    raise UserError(f"{base} has no {what} for {split}{only}; looked for {tried}; {hint}")


def _candidates(base: Path, patterns: Sequence[str], split: str) -> list[Path]:
    return [base / pattern.replace("{split}", name) for name in names_of(split) for pattern in patterns]


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON: {error}") from error


Record = dict[str, Any]


@dataclass(frozen=True)
class Records:
    """The validated content of an annotation file."""

    images: dict[int, Record]  # by id, in the order of the file
    annotations: list[Record]
    categories: dict[int, str]  # name by id, in the order of the file
    bad: dict[int, BadAnnotation]  # by image id: the first of its annotations that is invalid


def parse_records(document: Any, file: str, *, masks: bool, allow_outside: bool = False) -> Records:
    """The content of a document; annotations of images with an invalid one are left out.

    An error outside the annotations of an image is raised. With ``masks``, every object must have a
    segmentation. With ``allow_outside``, a file name may be absolute or contain ``..``.
    """
    parts: dict[str, list[Any]] = {}
    for name in ("images", "annotations", "categories"):
        part = document.get(name) if isinstance(document, dict) else None
        if not isinstance(part, list):
            raise UserError(
                f"{file} has no list {name!r}; COCO's files have images, annotations and categories"
            )
        parts[name] = part
    categories = _parse_categories(parts["categories"], file)
    images = _parse_images(parts["images"], file, allow_outside=allow_outside)
    bad: dict[int, BadAnnotation] = {}
    for annotation in parts["annotations"]:
        image = _image_of(annotation, images, file)
        try:
            _check_annotation(annotation, images[image], categories, file, masks=masks)
        except BadAnnotation as error:
            bad.setdefault(image, error.with_traceback(None))
    for image, excess in _too_many(parts["annotations"], images, file, masks=masks):
        bad.setdefault(image, excess)
    good = [a for a in parts["annotations"] if a["image_id"] not in bad] if bad else parts["annotations"]
    return Records(images, good, categories, bad)


def _parse_categories(records: list[Any], file: str) -> dict[int, str]:
    check_class_count(len(records), file)
    categories: dict[int, str] = {}
    names: set[str] = set()
    for record in records:
        number = record.get("id") if isinstance(record, dict) else None
        name = record.get("name") if isinstance(record, dict) else None
        if not is_int(number) or not isinstance(name, str):
            raise UserError(f"{file}: category {brief(record)} needs an integer 'id' and a 'name'")
        if number in categories or name in names:
            raise UserError(f"{file}: category {brief(record)} repeats an 'id' or 'name'; make them unique")
        categories[number] = name
        names.add(name)
    return categories


def _parse_images(records: list[Any], file: str, *, allow_outside: bool) -> dict[int, Record]:
    images: dict[int, Record] = {}
    limit = max_pixels()
    for position, record in enumerate(records):
        number = record.get("id") if isinstance(record, dict) else None
        if not is_int(number):
            raise BadAnnotation(file, f"number {position}", "id", f"{brief(number)} is not an integer")
        if number in images:
            raise BadAnnotation(file, str(number), "id", "two images have the same id")
        if not isinstance(record.get("file_name"), str) or not record["file_name"]:
            why = f"{brief(record.get('file_name'))} is not a file name"
            raise BadAnnotation(file, str(number), "file_name", why)
        if not allow_outside and not is_inside(record["file_name"]):
            why = f"{brief(record['file_name'])} lies outside the folder of the images"
            raise BadAnnotation(
                file, str(number), "file_name", f"{why}; CocoObjects(…, allow_outside=True) accepts it"
            )
        for side in ("width", "height"):
            if not is_int(record.get(side)) or record[side] < 1:
                why = f"{brief(record.get(side))} is not a number of pixels"
                raise BadAnnotation(file, str(number), side, why)
        if record["width"] * record["height"] > limit:
            why = f"{record['width']}×{record['height']} is more than {limit / 1e6:g} megapixels"
            raise BadAnnotation(file, str(number), "width", why)
        images[number] = record
    return images


def _image_of(record: Any, images: Mapping[int, Record], file: str) -> int:
    """The id of the image that an annotation belongs to."""
    if not isinstance(record, dict):
        raise UserError(f"{file}: annotation {brief(record)} is not an object with fields")
    image = record.get("image_id")
    if not is_int(image) or image not in images:
        why = f"there is no image {brief(image)} in the file (annotation {brief(record.get('id'))})"
        raise BadAnnotation(file, brief(image), "image_id", why)
    return image


def _check_annotation(
    record: Record, image: Record, categories: Mapping[int, str], file: str, *, masks: bool
) -> None:
    def wrong(field: str, why: str) -> BadAnnotation:
        return BadAnnotation(file, str(image["id"]), field, f"{why} (annotation {brief(record.get('id'))})")

    category, box = record.get("category_id"), record.get("bbox")
    if not is_int(category) or category not in categories:
        raise wrong("category_id", f"there is no category {brief(category)} in the file")
    if not isinstance(box, list) or len(box) != 4 or not all(map(is_finite, box)) or min(box[2:]) < 0:
        raise wrong("bbox", f"{brief(box)} is not [left, top, width, height] in pixels")
    size = (image["width"], image["height"])
    if why := box_error(box, size):
        raise wrong("bbox", why)
    if record.get("iscrowd", 0) not in (0, 1):
        raise wrong("iscrowd", f"{brief(record['iscrowd'])} is neither 0 nor 1")
    if not is_finite(record.get("area", 0)) or not 0 <= record.get("area", 0) <= 9 * size[0] * size[1]:
        raise wrong("area", f"{brief(record['area'])} is not a number of pixels of the image")
    if why := _segmentation_error(record.get("segmentation"), image, required=masks):
        raise wrong("segmentation", why)


def _too_many(
    annotations: Sequence[Record], images: Mapping[int, Record], file: str, *, masks: bool
) -> Iterator[tuple[int, BadAnnotation]]:
    """The images whose objects would take too much memory."""
    fields = {"objects": "image_id", "masks": "segmentation"}
    for image, count in Counter(annotation["image_id"] for annotation in annotations).items():
        size = (images[image]["width"], images[image]["height"])
        what, why = count_error(count, size, masks=masks)
        if why:
            yield image, BadAnnotation(file, str(image), fields[what], why)


def _segmentation_error(value: Any, image: Record, *, required: bool) -> str:
    """The reason why a segmentation is invalid, or an empty string."""
    if not value:
        return f"is missing; give polygons or run lengths, or {BOXES_ONLY}" if required else ""
    if isinstance(value, dict):
        size, counts = value.get("size"), value.get("counts")
        if size != [image["height"], image["width"]] or not all(map(is_int, size)):
            return f"its size is {brief(size)}, the image's [{image['height']}, {image['width']}]"
        if isinstance(counts, str):
            return ""  # compressed run lengths are only checked when they are decoded
        if not isinstance(counts, list) or not all(is_int(n) and n >= 0 for n in counts):
            return f"counts={brief(counts)} are not run lengths"
        if sum(counts) != size[0] * size[1]:
            return f"its run lengths cover {sum(counts)} pixels of {size[0] * size[1]}"
        return ""
    if not isinstance(value, list):
        return f"{brief(value)} is neither a list of polygons nor run lengths"
    if len(value) > MAX_POLYGONS:
        return f"{len(value):,} polygons are more than {MAX_POLYGONS:,}"
    width, height = image["width"], image["height"]
    for polygon in value:
        if why := polygon_error(polygon):
            return why
        for values, side in ((polygon[::2], width), (polygon[1::2], height)):
            if min(values) < -side or max(values) > 2 * side:
                return f"{brief(polygon)} does not lie in the image of {width}×{height} pixels"
    # The length is only computed where the number of points allows too long an outline.
    limit, points = MAX_OUTLINE * (width + height), sum(map(len, value)) // 2
    if points * 3 * max(width, height) > limit and sum(map(outline_length, value)) > limit:
        return f"its polygons are more than {limit:,} pixels long"
    return ""
