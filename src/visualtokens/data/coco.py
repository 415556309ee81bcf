"""COCO annotation files: a detection dataset, validation of the files, and mask encodings."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from visualtokens.data.base import SPLITS, Split, brief, check_class_count, check_split, is_inside, is_int
from visualtokens.data.decode import BadAnnotation, BadImage, max_pixels, read_image
from visualtokens.data.detection import DetectionDataset, Objects
from visualtokens.errors import UserError

logger = logging.getLogger(__name__)

ANNOTATIONS = ("annotations/instances_{split}2017.json", "annotations/instances_{split}.json")
IMAGES = ("{split}2017", "{split}", "images/{split}2017", "images/{split}", "images")
MAX_OBJECTS = 10_000  # in one image
MAX_MASK_BYTES = 2**31  # all masks of one image, a byte per object and pixel
MAX_POLYGONS = 1000  # of one object
MAX_OUTLINE = 1000  # length of these polygons, in widths plus heights of the image


class CocoObjects(DetectionDataset):
    """``/path/annotations/instances_train2017.json`` and the images in ``/path/train2017``; val likewise.

    The 2017 in the names is optional, and the image folders may be in ``/path/images``. Masks are polygons or
    run lengths, compressed or not. The annotation file is validated on opening; errors name file, image and
    field. Boxes of zero area are dropped with a warning; other boxes must overlap with the image, and may
    extend beyond it by at most its width or height, as may polygons. ``classes`` and ``ids`` (the image ids)
    are in the order of the file.

    A ``file_name`` must lie in the folder of the images, unless ``allow_outside=True``.
    """

    def __init__(
        self, root: str | Path, split: Split, *, masks: bool = True, allow_outside: bool = False
    ) -> None:
        check_split(split)
        base = Path(root).expanduser()
        self.spec = f"coco:{root}"
        self.file = _find(base, ANNOTATIONS, split, folder=False)
        self.folder = _find(base, IMAGES, split, folder=True)
        document = _read_json(self.file)
        records = parse_records(document, str(self.file), masks=masks, allow_outside=allow_outside)
        self.classes = list(records.categories.values())
        self.masks = masks
        self.ids = list(records.images)
        if not self.ids:
            raise UserError(f"{self.file} holds no images")
        self._names = [image["file_name"] for image in records.images.values()]
        self._sizes = np.array([(i["height"], i["width"]) for i in records.images.values()])  # (images, 2)
        self._annotations = _Annotations(records, str(self.file))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Image.Image, Objects]:
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
        _warn_empty(records.annotations, kept, file)
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


def _warn_empty(annotations: Sequence[dict[str, Any]], kept: Sequence[dict[str, Any]], file: str) -> None:
    if len(kept) < len(annotations):
        first = next(a for a in annotations if not (a["bbox"][2] > 0 and a["bbox"][3] > 0))
        logger.warning(
            "%s: %d boxes of zero area are dropped, the first in image %s",
            file,
            len(annotations) - len(kept),
            first["image_id"],
        )


def _find(base: Path, patterns: Sequence[str], split: Split, *, folder: bool) -> Path:
    candidates = [base / pattern.format(split=split) for pattern in patterns]
    for candidate in candidates:
        if candidate.is_dir() if folder else candidate.is_file():
            return candidate
    tried = ", ".join(str(candidate.relative_to(base)) for candidate in candidates)
    what = "folder of images" if folder else "annotation file"
    others = [s for s in SPLITS if any((base / pattern.format(split=s)).exists() for pattern in patterns)]
    only = f", only for {', '.join(others)}" if others else ""
    raise UserError(f"{base} has no {what} for {split}{only}; looked for {tried}")


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


def parse_records(document: Any, file: str, *, masks: bool, allow_outside: bool = False) -> Records:
    """The content of a document; the first error is raised with file, image and field.

    With ``masks``, every object must have a segmentation. With ``allow_outside``, a file name may be absolute
    or contain ``..``.
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
    for annotation in parts["annotations"]:
        _check_annotation(annotation, images, categories, file, masks=masks)
    _check_counts(parts["annotations"], images, file, masks=masks)
    return Records(images, parts["annotations"], categories)


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


def _check_annotation(
    record: Any, images: Mapping[int, Record], categories: Mapping[int, str], file: str, *, masks: bool
) -> None:
    if not isinstance(record, dict):
        raise UserError(f"{file}: annotation {brief(record)} is not an object with fields")
    image, category = record.get("image_id"), record.get("category_id")

    def wrong(field: str, why: str) -> BadAnnotation:
        return BadAnnotation(file, brief(image), field, f"{why} (annotation {brief(record.get('id'))})")

    if not is_int(image) or image not in images:
        raise wrong("image_id", f"there is no image {brief(image)} in the file")
    if not is_int(category) or category not in categories:
        raise wrong("category_id", f"there is no category {brief(category)} in the file")
    box = record.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_finite, box)) or min(box[2:]) < 0:
        raise wrong("bbox", f"{brief(box)} is not [left, top, width, height] in pixels")
    size = (images[image]["width"], images[image]["height"])
    for low, length, side in zip(box[:2], box[2:], size, strict=True):
        if not -side <= low <= low + length <= 2 * side or (length and not -length < low < side):
            raise wrong("bbox", f"{brief(box)} does not lie in the image of {size[0]}×{size[1]} pixels")
    if record.get("iscrowd", 0) not in (0, 1):
        raise wrong("iscrowd", f"{brief(record['iscrowd'])} is neither 0 nor 1")
    if not _is_finite(record.get("area", 0)) or not 0 <= record.get("area", 0) <= 9 * size[0] * size[1]:
        raise wrong("area", f"{brief(record['area'])} is not a number of pixels of the image")
    why = _segmentation_error(record.get("segmentation"), images[image], required=masks)
    if why:
        raise wrong("segmentation", why)


def _check_counts(
    annotations: Sequence[Record], images: Mapping[int, Record], file: str, *, masks: bool
) -> None:
    """Raise if the objects of one image would take too much memory."""
    for image, count in Counter(annotation["image_id"] for annotation in annotations).items():
        pixels = images[image]["width"] * images[image]["height"]
        if count > MAX_OBJECTS:
            raise BadAnnotation(file, str(image), "image_id", f"{count:,} objects, more than {MAX_OBJECTS:,}")
        if masks and count * pixels > MAX_MASK_BYTES:
            why = f"{count:,} masks of {pixels:,} pixels take more than {MAX_MASK_BYTES:,} bytes"
            raise BadAnnotation(file, str(image), "segmentation", why)


def _segmentation_error(value: Any, image: Record, *, required: bool) -> str:
    """The reason why a segmentation is invalid, or an empty string."""
    if not value:
        return "is missing; give polygons or run lengths, or train a detector of boxes" if required else ""
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
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
            return f"{brief(polygon)} is not a polygon: x and y of at least three points"
        if not all(map(_is_finite, polygon)):
            return f"{brief(polygon)} holds something that is not a number"
        for values, side in ((polygon[::2], width), (polygon[1::2], height)):
            if min(values) < -side or max(values) > 2 * side:
                return f"{brief(polygon)} does not lie in the image of {width}×{height} pixels"
    # The length is only computed where the number of points allows too long an outline.
    limit, points = MAX_OUTLINE * (width + height), sum(map(len, value)) // 2
    if points * 3 * max(width, height) > limit and sum(map(_outline_length, value)) > limit:
        return f"its polygons are more than {limit:,} pixels long"
    return ""


def _outline_length(polygon: list[float]) -> float:
    """The number of pixels along the edges, which the decoder allocates."""
    xy = np.array(polygon).reshape(-1, 2)
    return float(np.abs(np.diff(xy, axis=0, append=xy[:1])).max(1).sum())


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e18 < value < 1e18


def to_mask(segmentation: Any, height: int, width: int) -> NDArray[np.bool_]:
    """The pixels ``(H, W)`` inside polygons or run lengths; ValueError if it is neither."""
    library = masks_library()
    try:
        return library.decode(library.segmToRle(segmentation, width, height)).astype(np.bool_)
    except RuntimeError as error:  # of the conversion to C++
        raise ValueError("neither polygons nor run lengths") from error


def to_run_lengths(mask: NDArray[np.bool_]) -> dict[str, Any]:
    """The mask ``(H, W)`` as COCO's compressed run lengths."""
    return masks_library().encode(np.asfortranarray(mask.astype(np.uint8)))


def masks_library() -> Any:
    """The mask operations of faster-coco-eval, which also computes the detection metrics."""
    try:
        from faster_coco_eval.core import mask
    except ImportError as error:
        raise UserError(
            "COCO masks and metrics need a library; install it with: pip install 'visualtokens[detect]'"
        ) from error
    return mask
