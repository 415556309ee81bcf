"""Where a map on the patch grid lies on the picture it came from.

All coordinates are continuous, in pixels, with pixel i covering [i, i + 1): its centre is i + 0.5. A
box is (left, top, right, bottom) in these coordinates, as in PIL, and need not fall on whole pixels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Box = tuple[float, float, float, float]
Floats = NDArray[np.floating]


def place(heat: Floats, box: Box, size: tuple[int, int]) -> tuple[Floats, NDArray[np.bool_]]:
    """Spread ``heat (h, w)`` over ``box`` on a canvas of ``size`` = (width, height).

    Returns the canvas ``(height, width)``, zero outside the box, and which pixels have their centre
    inside it. Bilinear between the centres of the cells, constant beyond the outermost centres: the
    same surface that ``interpolate(..., mode="bilinear", align_corners=False)`` samples.
    """
    left, top, right, bottom = box
    width, height = size
    x = (np.arange(width) + 0.5 - left) / (right - left)  # (width,): 0 to 1 inside the box
    y = (np.arange(height) + 0.5 - top) / (bottom - top)  # (height,)
    inside = ((y >= 0) & (y <= 1))[:, None] & ((x >= 0) & (x <= 1))[None]  # (height, width)
    canvas = _hat(y, heat.shape[0]) @ heat @ _hat(x, heat.shape[1]).T  # (height, width)
    return np.where(inside, canvas, 0).astype(np.float32), inside


def _hat(t: Floats, cells: int) -> Floats:
    """``(len(t), cells)``: the weight of each cell at the places t, where 0 to 1 spans all cells."""
    position = np.clip(t * cells - 0.5, 0, cells - 1)  # (T,) in units of cell centres
    return np.maximum(0, 1 - np.abs(position[:, None] - np.arange(cells)))


def scale_box(box: Box, before: tuple[int, int], after: tuple[int, int]) -> Box:
    """The same box when its picture is resized from one (width, height) to another."""
    sx, sy = after[0] / before[0], after[1] / before[1]
    return box[0] * sx, box[1] * sy, box[2] * sx, box[3] * sy
