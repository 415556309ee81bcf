"""Masks: one class per pixel, as an image file whose values are numbers and not colours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from visualtokens.data.decode import DAMAGE, BadImage, check_file, check_pixels

IGNORE = 255  # the class of pixels that nobody is asked about
FORMATS = ("PNG", "BMP", "TIFF", "PPM")  # those that keep numbers as they are
EXTENSIONS = frozenset({".png", ".bmp", ".tif", ".tiff", ".pgm"})
_NUMBERS = ("L", "P", "1", "I;16", "I;16B", "I;16L", "I")  # modes whose values can be numbers of classes

Mask = NDArray[np.uint8]  # (H, W)


class BadAnnotation(BadImage):
    """An annotation that cannot be used: its file, the image it belongs to, the field, and why."""

    def __init__(self, path: str, image_id: str, field: str, why: str) -> None:
        super().__init__(path, f"annotation of image {image_id}, {field}: {why}")
        self.image_id = image_id
        self.field = field
        self.why = why

    def __reduce__(self) -> tuple[type[BadAnnotation], tuple[str, str, str, str]]:  # type: ignore[override]
        return BadAnnotation, (self.path, self.image_id, self.field, self.why)


def read_mask(path: str | Path, *, image_id: str | None = None) -> NDArray[np.integer]:
    """The numbers ``(H, W)`` in the file; of a palette its indices, not its colours."""
    file, name = Path(path), str(path)
    image_id = file.stem if image_id is None else image_id
    try:
        check_file(file, name)
        with Image.open(file, formats=FORMATS) as image:
            check_pixels(image, name)
            if image.mode not in _NUMBERS:
                why = f"{image.mode} holds colours; save one number per pixel (a grey or palette PNG)"
                raise BadAnnotation(name, image_id, "mode", why)
            values = np.asarray(image)
    except BadAnnotation:
        raise
    except BadImage as bad:
        raise BadAnnotation(name, image_id, "file", bad.reason) from bad
    except UnidentifiedImageError as error:
        why = f"not an image in a format that keeps numbers ({', '.join(FORMATS)})"
        raise BadAnnotation(name, image_id, "file", why) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning, *DAMAGE) as error:
        why = f"damaged or unsupported: {error or type(error).__name__}"
        raise BadAnnotation(name, image_id, "file", why) from error
    return values.astype(np.uint8) if values.dtype == np.bool_ else values


def renumber(values: NDArray[np.integer], table: NDArray[np.int16], *, path: str, image_id: str) -> Mask:
    """The classes of the numbers in a file: ``table[number]``, where -1 is no number of the dataset."""
    inside = (values >= 0) & (values < len(table))
    classes = np.where(inside, table[np.where(inside, values, 0)], -1)
    if (classes < 0).any():
        row, column = np.argwhere(classes < 0)[0].tolist()
        known = np.flatnonzero(table >= 0)
        why = (
            f"{values[row, column]} at row {row}, column {column} is not a number of this dataset "
            f"({_spans(known.tolist())})"
        )
        raise BadAnnotation(path, image_id, "pixels", why)
    return classes.astype(np.uint8)


def _spans(numbers: list[int]) -> str:
    """The numbers as text: 0 to 20, 255."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans)
