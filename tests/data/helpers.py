"""Small images and masks on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def save(image: Path, mask: Path, values: Any, colour: str = "red", *, palette: Any = None) -> None:
    """Write a mask of numbers ``(H, W)``, perhaps with a palette, or colours ``(H, W, 3)``, and an image."""
    array = np.array(values, np.uint8)
    for path in (image, mask):
        path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (array.shape[1], array.shape[0]), colour).save(image)
    drawn = Image.fromarray(array)
    if palette is not None:
        drawn.putpalette(np.array(palette, np.uint8).tobytes())
    drawn.save(mask)
