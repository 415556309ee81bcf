"""Foreground masks: the trimaps of Oxford-IIIT Pets (1, 2, 3), or white on black."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visualtokens.data import BadImage, Preprocess
from visualtokens.data.decode import read_mask
from visualtokens.errors import UserError

FOREGROUND, BACKGROUND, UNDECIDED = (1, 255), (2, 0), (3,)
SUFFIXES = (".png", ".bmp", ".gif", ".tif", ".tiff")


def read_foreground(path: str | Path, preprocess: Preprocess, size: tuple[int, int]) -> NDArray[np.int8]:
    """``(H, W)``: the mask as the model sees the image of ``size`` (width, height).

    1 is foreground, 0 background, -1 undecided.
    """
    numbers = read_mask(path, colours="grey")
    height, width = numbers.shape
    if (width, height) != size:
        raise BadImage(str(path), f"a mask of {width}×{height} for an image of {size[0]}×{size[1]}")
    mask = Image.fromarray(numbers if numbers.dtype == np.uint8 else numbers.astype(np.int32))
    height, width = preprocess.size
    box = preprocess.crop_box(*size)
    values = np.asarray(mask.resize((width, height), Image.Resampling.NEAREST, box=box))  # (H, W)
    invalid = set(np.unique(values).tolist()) - {*FOREGROUND, *BACKGROUND, *UNDECIDED}
    if invalid:
        raise BadImage(
            str(path), f"a mask with the value {min(invalid)}; expected 1, 2, 3 (trimap) or 0, 255"
        )
    out = np.full(values.shape, -1, dtype=np.int8)
    out[np.isin(values, FOREGROUND)] = 1
    out[np.isin(values, BACKGROUND)] = 0
    return out


def find_mask(image: str, masks: str | Path) -> Path:
    """The mask of an image: the file with the same stem, with or without the class and split folders.

    For ``…/val/beagle/beagle_3.jpg`` that is ``masks/val/beagle/beagle_3.png``, ``masks/beagle/beagle_3.png``
    or ``masks/beagle_3.png``.
    """
    parts = Path(image).parts
    for depth in (3, 2, 1):
        stem = Path(masks, *parts[-depth:-1], Path(parts[-1]).stem)
        for suffix in SUFFIXES:
            # with_suffix would cut a name such as photo.1
            if (path := stem.with_name(stem.name + suffix)).exists():
                return path
    raise UserError(f"{image} has no mask in {masks}; expected a file such as {Path(image).stem}.png there")
