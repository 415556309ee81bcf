"""What a COCO annotation file must hold. The first thing that is wrong is told by file, image and field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from visualtokens.data.masks import BadAnnotation
from visualtokens.errors import UserError

Record = dict[str, Any]


@dataclass(frozen=True)
class Records:
    """A file that passed."""

    images: dict[int, Record]  # by id, in the order of the file
    annotations: list[Record]
    categories: dict[int, str]  # name by id, in the order of the file


def check_records(document: Any, file: str, *, masks: bool) -> Records:
    """The parts of a document. ``masks`` demands a segmentation of every object."""
    parts: dict[str, list[Any]] = {}
    for name in ("images", "annotations", "categories"):
        part = document.get(name) if isinstance(document, dict) else None
        if not isinstance(part, list):
            raise UserError(
                f"{file} has no list {name!r}; COCO's files have images, annotations and categories"
            )
        parts[name] = part
    categories = _categories(parts["categories"], file)
    images = _images(parts["images"], file)
    for annotation in parts["annotations"]:
        _check_annotation(annotation, images, categories, file, masks=masks)
    return Records(images, parts["annotations"], categories)


def _categories(records: list[Any], file: str) -> dict[int, str]:
    categories: dict[int, str] = {}
    for record in records:
        number = record.get("id") if isinstance(record, dict) else None
        name = record.get("name") if isinstance(record, dict) else None
        if not _whole(number) or not isinstance(name, str):
            raise UserError(f"{file}: category {_brief(record)} needs a whole number 'id' and a 'name'")
        if number in categories or name in categories.values():
            raise UserError(f"{file}: category {_brief(record)} is there twice; 'id' and 'name' must differ")
        categories[number] = name
    if not categories:
        raise UserError(f"{file} has no categories; name at least one class")
    return categories


def _images(records: list[Any], file: str) -> dict[int, Record]:
    images: dict[int, Record] = {}
    for place, record in enumerate(records):
        number = record.get("id") if isinstance(record, dict) else None
        if not _whole(number):
            raise BadAnnotation(file, f"number {place}", "id", f"{_brief(number)} is not a whole number")
        if number in images:
            raise BadAnnotation(file, str(number), "id", "two images have the same")
        if not isinstance(record.get("file_name"), str) or not record["file_name"]:
            raise BadAnnotation(
                file, str(number), "file_name", f"{_brief(record.get('file_name'))} is no name"
            )
        for side in ("width", "height"):
            if not _whole(record.get(side)) or record[side] < 1:
                why = f"{_brief(record.get(side))} is not a number of pixels"
                raise BadAnnotation(file, str(number), side, why)
        images[number] = record
    return images


def _check_annotation(
    record: Any, images: Mapping[int, Record], categories: Mapping[int, str], file: str, *, masks: bool
) -> None:
    if not isinstance(record, dict):
        raise UserError(f"{file}: annotation {_brief(record)} is not an object with fields")
    image, category = record.get("image_id"), record.get("category_id")
    of = str(image)

    def wrong(field: str, why: str) -> BadAnnotation:
        return BadAnnotation(file, of, field, f"{why} (annotation {_brief(record.get('id'))})")

    if not _whole(image) or image not in images:
        raise wrong("image_id", f"there is no image {_brief(image)} in the file")
    if not _whole(category) or category not in categories:
        raise wrong("category_id", f"there is no category {_brief(category)} in the file")
    box = record.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(map(_finite, box)) or min(box[2:]) < 0:
        raise wrong("bbox", f"{_brief(box)} is not [left, top, width, height] in pixels")
    if record.get("iscrowd", 0) not in (0, 1):
        raise wrong("iscrowd", f"{_brief(record['iscrowd'])} is neither 0 nor 1")
    if not _finite(record.get("area", 0)) or record.get("area", 0) < 0:
        raise wrong("area", f"{_brief(record['area'])} is not a number of pixels")
    why = _segmentation_fault(record.get("segmentation"), images[image], needed=masks)
    if why:
        raise wrong("segmentation", why)


def _segmentation_fault(value: Any, image: Record, *, needed: bool) -> str:
    """What is wrong with a segmentation; empty if nothing is."""
    if not value:
        return "there is none; give polygons or run lengths, or train a detector of boxes" if needed else ""
    if isinstance(value, dict):
        size, counts = value.get("size"), value.get("counts")
        if size != [image["height"], image["width"]]:
            return f"its size is {_brief(size)}, the image's [{image['height']}, {image['width']}]"
        if isinstance(counts, str):
            return ""  # told when it is decoded: checking means decoding
        if not isinstance(counts, list) or not all(_whole(n) and n >= 0 for n in counts):
            return f"counts={_brief(counts)} are not run lengths"
        if sum(counts) != size[0] * size[1]:
            return f"its run lengths cover {sum(counts)} pixels of {size[0] * size[1]}"
        return ""
    if not isinstance(value, list):
        return f"{_brief(value)} is neither a list of polygons nor run lengths"
    for polygon in value:
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
            return f"{_brief(polygon)} is not a polygon: x and y of at least three points"
        if not all(map(_finite, polygon)):
            return f"{_brief(polygon)} holds something that is not a number"
    return ""


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
