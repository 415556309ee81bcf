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
    x = _share(size[0], box[0], box[2])  # (width,)
    y = _share(size[1], box[1], box[3])  # (height,)
    inside = _inside(x, y)
    canvas = _hat(y, heat.shape[0]) @ heat @ _hat(x, heat.shape[1]).T  # (height, width)
    return np.where(inside, canvas, 0).astype(np.float32), inside


def enlarge(heat: Floats, height: int, width: int) -> Floats:
    """The heat of cells that cover a whole image, for each of its pixels."""
    return place(heat, (0, 0, width, height), (width, height))[0]


def cells(labels: NDArray[np.int64], box: Box, size: tuple[int, int]) -> NDArray[np.int64]:
    """Spread ``labels (h, w)`` over ``box`` on a canvas of ``size`` = (width, height), without blending.

    Every pixel has the label of the cell that its centre lies in, and -2 where that is outside the box.
    """
    x = _share(size[0], box[0], box[2])  # (width,)
    y = _share(size[1], box[1], box[3])  # (height,)
    row = np.clip((y * labels.shape[0]).astype(int), 0, labels.shape[0] - 1)
    column = np.clip((x * labels.shape[1]).astype(int), 0, labels.shape[1] - 1)
    return np.where(_inside(x, y), labels[row[:, None], column], -2)


def _share(pixels: int, start: float, end: float) -> Floats:
    """``(pixels,)``: where the centre of each pixel lies, 0 to 1 from start to end."""
    return (np.arange(pixels) + 0.5 - start) / (end - start)


def _inside(x: Floats, y: Floats) -> NDArray[np.bool_]:
    return ((y >= 0) & (y <= 1))[:, None] & ((x >= 0) & (x <= 1))[None]  # (height, width)


def _hat(t: Floats, cells: int) -> Floats:
    """``(len(t), cells)``: the weight of each cell at the places t, where 0 to 1 spans all cells."""
    position = np.clip(t * cells - 0.5, 0, cells - 1)  # (T,) in units of cell centres
    return np.maximum(0, 1 - np.abs(position[:, None] - np.arange(cells)))


def scale_box(box: Box, before: tuple[int, int], after: tuple[int, int]) -> Box:
    """The same box when its picture is resized from one (width, height) to another."""
    sx, sy = after[0] / before[0], after[1] / before[1]
    return box[0] * sx, box[1] * sy, box[2] * sx, box[3] * sy
