"""Pictures that say where the foreground is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visualtokens.data import BadImage, Preprocess
from visualtokens.errors import UserError

# What a pixel of a mask means: the trimaps of Oxford-IIIT Pets (1, 2, 3), and black and white masks.
FOREGROUND, BACKGROUND, UNDECIDED = (1, 255), (2, 0), (3,)
SUFFIXES = (".png", ".bmp", ".gif", ".tif", ".tiff")


def read_mask(path: str | Path, preprocess: Preprocess, size: tuple[int, int]) -> NDArray[np.int8]:
    """``(H, W)`` as the model sees the image of ``size`` (width, height): 1 foreground, 0 not, -1 undecided.

    The file has the values of the Pets' trimaps (1 foreground, 2 background, 3 undecided), or is black
    and white.
    """
    try:
        with Image.open(path) as image:
            indexed = image.mode == "P"  # whose numbers count, not their colours
            mask = image.copy() if indexed else image.convert("L")
    except OSError as error:
        raise BadImage(str(path), f"not a readable mask: {error}") from error
    if mask.size != size:
        raise BadImage(str(path), f"a mask of {mask.width}×{mask.height} for an image of {size[0]}×{size[1]}")
    rows, columns = preprocess.size
    box = preprocess.crop_box(*size)
    seen = np.asarray(mask.resize((columns, rows), Image.Resampling.NEAREST, box=box))  # (H, W)
    known = (*FOREGROUND, *BACKGROUND, *UNDECIDED)
    strange = sorted(set(np.unique(seen).tolist()) - set(known))
    if strange:
        raise BadImage(str(path), f"a mask with the value {strange[0]}; they are 1, 2, 3 (trimap) or 0, 255")
    out = np.full(seen.shape, -1, dtype=np.int8)
    out[np.isin(seen, FOREGROUND)] = 1
    out[np.isin(seen, BACKGROUND)] = 0
    return out


def find_mask(image: str, masks: str | Path) -> Path:
    """The mask of an image: the file of the same name, in the same class and split folder if there is one.

    For ``…/val/beagle/beagle_3.jpg`` that is ``masks/val/beagle/beagle_3.png``, ``masks/beagle/beagle_3.png``
    or ``masks/beagle_3.png``.
    """
    parts = Path(image).parts
    for depth in (3, 2, 1):
        stem = Path(masks, *parts[-depth:-1], Path(parts[-1]).stem)
        for suffix in SUFFIXES:
            # Not with_suffix, which would cut a name such as photo.1
            if (found := stem.with_name(stem.name + suffix)).is_file():
                return found
    raise UserError(f"{image} has no mask in {masks}; expected a file such as {Path(image).stem}.png there")
