"""What all annotation files of objects share: limits, checks of boxes and polygons, and mask encodings."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from visualtokens.data.base import SPLIT_OF, Split, brief, check_class_count, split_rows
from visualtokens.data.decode import EXTENSIONS, BadAnnotation
from visualtokens.data.detection import Objects
from visualtokens.data.folder import Walk
from visualtokens.errors import UserError

logger = logging.getLogger(__name__)

MAX_OBJECTS = 10_000  # in one image
MAX_MASK_BYTES = 2**31  # all masks of one image, a byte per object and pixel
MAX_POLYGONS = 1000  # of one object
MAX_OUTLINE = 1000  # length of these polygons, in widths plus heights of the image
MAX_FILE_BYTES = 2**24  # of a file with the annotations of one image; 10,000 objects take about 3 MB
MAX_NAME = 1000  # characters of the name of a class
MAX_PATH, MAX_FILE_NAME = 1000, 250  # characters of a path, bytes of each of its names
MAX_LIST_BYTES = 2**30  # of a file that lists images or classes
BOXES_ONLY = "train a detector of boxes (--model faster_rcnn)"  # how to use annotations without masks

V = TypeVar("V", bound=np.generic)
Size = tuple[int, int]  # width, height


# Checks. Each returns the reason why a value is invalid, or an empty string.


def is_finite(value: Any) -> bool:
    """Whether a value from a file is a number that later computations can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e18 < value < 1e18


def is_near(low: float, length: float, side: float) -> bool:
    """Whether an interval overlaps with that from 0 to ``side`` and extends beyond it by at most ``side``.

    An interval of length 0 need not overlap.
    """
    return -side <= low <= low + length <= 2 * side and (not length or -length < low < side)


def box_error(box: Sequence[float], size: Size) -> str:
    """Check a box (left, top, width, height) in an image of ``size`` (width, height)."""
    if all(is_near(box[axis], box[axis + 2], size[axis]) for axis in (0, 1)):
        return ""
    return f"{brief(list(box))} does not lie in the image of {size[0]}×{size[1]} pixels"


def polygon_error(polygon: Any) -> str:
    """Check that a polygon is a list of x and y of at least three points."""
    if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
        return f"{brief(polygon)} is not a polygon: x and y of at least three points"
    if not all(map(is_finite, polygon)):
        return f"{brief(polygon)} holds something that is not a number"
    return ""


def outline_length(polygon: Sequence[float]) -> float:
    """The number of pixels along the edges, which the decoder of polygons allocates."""
    xy = np.array(polygon).reshape(-1, 2)
    return float(np.abs(np.diff(xy, axis=0, append=xy[:1])).max(1).sum())


def count_error(count: int, size: Size, *, masks: bool) -> tuple[str, str]:
    """Check that the objects of one image fit into memory; the word before the reason is what is too much."""
    pixels = size[0] * size[1]
    if count > MAX_OBJECTS:
        return "objects", f"{count:,} objects, more than {MAX_OBJECTS:,}"
    if masks and count * pixels > MAX_MASK_BYTES:
        return "masks", f"{count:,} masks of {pixels:,} pixels take more than {MAX_MASK_BYTES:,} bytes"
    return "", ""


def to_number(text: str | None) -> float | None:
    """The number that a text stands for, or None."""
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if is_finite(number) else None


# Reading.


def is_too_long(name: str) -> bool:
    """Whether no file can have this name, also with another ending."""
    parts = os.fsencode(name).split(b"/")
    return len(name) > MAX_PATH or max(map(len, parts)) > MAX_FILE_NAME


def read_bytes(file: Path, *, most: int = MAX_FILE_BYTES) -> bytes:
    """The content of a file of at most ``most`` bytes; anything else raises :class:`UserError`."""
    if not file.is_file():
        raise UserError(f"{file} is not a file" if file.exists() else f"{file} does not exist")
    size = file.stat().st_size
    if size > most:
        raise UserError(f"{file} has {size / 1e6:,.0f} MB, more than the {most / 1e6:,.0f} MB that are read")
    return file.read_bytes()


def read_lines(file: Path, *, most: int = MAX_LIST_BYTES) -> list[str]:
    """The lines of a text file; bytes that are not UTF-8 are decoded as in file names."""
    text = read_bytes(file, most=most).decode("utf-8", "surrogateescape")
    return text.removeprefix("\ufeff").splitlines()


def files_by_name(folder: Path, extensions: Collection[str] = EXTENSIONS) -> dict[str, Path]:
    """The files below a folder by their path in it without extension, sorted.

    Files and folders with a leading dot are left out; two files of the same name raise :class:`UserError`.
    """
    found: dict[str, Path] = {}
    for parent, names in Walk(folder)():
        for name in names:
            stem, extension = os.path.splitext(name)
            if extension.lower() not in extensions or name.startswith("."):
                continue
            path = Path(parent, name)
            other = found.setdefault(os.path.relpath(os.path.join(parent, stem), folder), path)
            if other is not path:
                raise UserError(f"{path} and {other} have the same name; rename one of them")
    return dict(sorted(found.items()))


def check_names(names: Sequence[str] | str, source: str) -> list[str]:
    """The names of classes as a list, if their number is within the limits and all differ.

    One name stands for a list of it, as an option of the command line gives it.
    """
    names = [names] if isinstance(names, str) else names
    check_class_count(len(names), source)
    seen: set[str] = set()
    for name in names:
        if not isinstance(name, str):
            raise UserError(f"{source}: the class {brief(name)} is not a name; give text")
        if len(name) > MAX_NAME:
            raise UserError(f"{source}: the class {brief(name)} is longer than {MAX_NAME:,} characters")
        if name in seen:
            raise UserError(f"{source} names the class {brief(name)} twice")
        seen.add(name)
    return list(names)


def names_of(split: str) -> list[str]:
    """What a split is called in the names of folders and files, its own name first."""
    return [name for name, each in SPLIT_OF.items() if each == split]


def divide(names: Sequence[str], split: Split, share: float | None, *, source: str) -> list[int]:
    """The positions of the images of a split in data that are not divided: ``share`` are for validation."""
    if split == "test":
        raise UserError(f"{source} has no test split")
    if share is None:
        if split == "val":
            raise UserError(f"{source} has no validation split; hold out a share: --val_share 0.2")
        return list(range(len(names)))
    return split_rows(split, names, share, source=source)


class Ragged(Generic[V]):
    """Arrays of different lengths as one, which forked workers share; a list of arrays would be copied."""

    def __init__(self, parts: Sequence[NDArray[V]], *, like: NDArray[V]) -> None:
        """``like`` is an empty array of the dtype and the shape of the parts."""
        self.values = np.concatenate([like, *parts])
        self.ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> NDArray[V]:
        return self.values[self.ends[index - 1] if index else 0 : self.ends[index]]


def boxes_as_objects(
    boxes: NDArray[np.floating],
    labels: NDArray[np.int64],
    *,
    masks: torch.Tensor | None = None,
    crowd: NDArray[np.bool_] | None = None,
    area: NDArray[np.floating] | None = None,
) -> Objects:
    """The objects with these boxes ``(n, 4)`` (left, top, right, bottom), labels ``(n,)`` and masks.

    Their area is by default that of the mask, or of the box if there are no masks.
    """
    if area is None:
        area = (boxes[:, 2:] - boxes[:, :2]).prod(1) if masks is None else masks.sum((1, 2)).numpy()
    return Objects(
        torch.from_numpy(boxes.astype(np.float32)),
        torch.tensor(labels),
        masks,
        torch.zeros(len(boxes), dtype=torch.bool) if crowd is None else torch.tensor(crowd),
        torch.from_numpy(area.astype(np.float32)),
    )


def warn_dropped(count: int, first: str, source: str) -> None:
    """Log how many boxes of zero area were dropped, and where the first one is."""
    if count:
        boxes = "box" if count == 1 else "boxes"
        logger.warning("%s: %d %s of zero area dropped, the first in %s", source, count, boxes, first)


def raise_first(bad: Mapping[int, BadAnnotation]) -> None:
    """Raise the first of the invalid annotations, and say how many more there are."""
    if not bad:
        return
    first = bad[min(bad)]
    if len(bad) == 1:
        raise first
    hint = f"{len(bad) - 1} more images have invalid annotations; vtok data check lists all"
    raise BadAnnotation(first.path, first.image_id, first.field, f"{first.why} ({hint})")


# Masks.


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
