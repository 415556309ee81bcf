"""PaCa Sec. 3.5: how much each cluster matters to a prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch import Tensor

from visualtokens.data import BadImage, Preprocess
from visualtokens.errors import UserError
from visualtokens.explain.layers import Ints

# Two clusters whose drops in probability differ by less have "similar effects" (Sec. 3.5).
TIE = 1e-3
# A map whose spread is below this share of its maximum is constant: the rest is float32 rounding.
FLAT = 1e-6


def normalise(maps: Tensor) -> Tensor:
    """Sec. 3.5: H = (C - min C) / (max C - min C), each map of ``(K, h, w)`` by itself.

    A constant map singles out no region, so it becomes zeros and masks nothing.
    """
    maps = maps.float()
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)  # (K, 1, 1)
    flat = high - low <= FLAT * high.abs()
    return torch.where(flat, 0.0, (maps - low) / torch.where(flat, 1.0, high - low))  # (K, h, w)


def entropy(maps: Tensor) -> Tensor:
    """``(K,)``, in nats: how spread out each map of ``(K, h, w)`` is, read as shares of its sum.

    A map without any weight says nothing about where it lies and counts as evenly spread.
    """
    weights = maps.float().flatten(1)  # (K, N)
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, 1.0)
    return torch.special.entr(weights / weights.sum(1, keepdim=True)).sum(1)


def mask(x: Tensor, black: Tensor, heat: Tensor) -> Tensor:
    """``(K, 3, H, W)``: the input ``x (3, H, W)`` times 1 - H, for each H of ``heat (K, h, w)``.

    The picture is what Sec. 3.5 masks, not its normalised values: there, a masked pixel is black.
    With x = (picture - mean) / std, picture · (1 - H) becomes x · (1 - H) + black · H, where
    ``black (3, 1, 1)`` = -mean / std.
    """
    heat = F.interpolate(heat.unsqueeze(1), size=x.shape[1:], mode="bilinear", align_corners=False)
    return x * (1 - heat) + black * heat  # (K, 3, H, W)


def masked_probabilities(
    probability: Callable[[Tensor], Tensor], x: Tensor, black: Tensor, heat: Tensor, *, batch: int
) -> Tensor:
    """``(K,)``: what ``probability`` ((B, 3, H, W) → (B,)) says once each cluster is masked.

    At most ``batch`` masked pictures exist at a time, however many clusters there are.
    """
    out = heat.new_zeros(heat.shape[0])
    for start in range(0, heat.shape[0], batch):
        part = slice(start, start + batch)
        out[part] = probability(mask(x, black, heat[part]))
    return out


def rank(importance: Sequence[float], spread: Sequence[float], *, tie: float = TIE) -> list[int]:
    """The clusters, most important first; among near-equals the one of lower entropy comes first.

    Near-equal are those less than ``tie`` below the best cluster not yet ranked, so a long slope of
    small differences never counts as one tie.
    """
    left = sorted(range(len(importance)), key=lambda k: -importance[k])
    order: list[int] = []
    while left:
        best = importance[left[0]]
        equals = [k for k in left if k == left[0] or best - importance[k] < tie]
        order += sorted(equals, key=lambda k: (spread[k], k))
        left = left[len(equals) :]
    return order


def combine(maps: NDArray[np.floating], importance: NDArray[np.floating]) -> NDArray[np.floating]:
    """``(h, w)``, 0 to 1: the mean of the maps ``(K, h, w)``, each weighted by its importance ``(K,)``.

    A cluster without which the class would be more probable speaks against it and is left out. All zeros
    where nothing speaks for the class.
    """
    weights = np.maximum(importance, 0)  # (K,)
    total = np.tensordot(weights, maps, axes=1)  # (h, w)
    low, high = total.min(), total.max()
    return (total - low) / (high - low) if high > low else np.zeros_like(total)


# Tokens as regions of a picture: their borders, and a mosaic of what each stands for.
#
# A line is white between two dark ones, so it shows on any photo and on a grey print.

OUTSIDE = 0.35  # how bright the part that the model never saw, or no token stands for, is left
LINES = 480  # pixels of a picture's longer side for which a line is one pixel wide, to either side


def outlined(image: Image.Image, assignment: Ints, *, box: Box, token: int | None = None) -> Image.Image:
    """Draw the borders between the tokens of ``assignment (h, w)`` over the box, or around one token."""
    labels = cells(assignment, box, image.size)  # (H, W)
    if token is not None:
        labels = np.where(labels == token, 1, np.where(labels < -1, -2, 0))
    return _draw_lines(image, labels)


def mosaic(image: Image.Image, assignment: Ints, *, box: Box) -> Image.Image:
    """Each token's patches in the mean colour of all of them, with borders; what is dropped is dark.

    So patches that stand apart but belong to one token look alike.
    """
    labels = cells(assignment, box, image.size)  # (H, W)
    pixels = np.asarray(image.convert("RGB"), dtype=np.float64)  # (H, W, 3)
    held = labels >= 0
    count = np.bincount(labels[held])  # (K,)
    sums = np.stack([np.bincount(labels[held], pixels[held, c]) for c in range(3)], axis=1)  # (K, 3)
    means = sums / np.maximum(count, 1)[:, None]
    flat = OUTSIDE * np.broadcast_to(pixels.mean(2, keepdims=True), pixels.shape).copy()
    flat[held] = means[labels[held]]
    return _draw_lines(Image.fromarray(flat.round().astype(np.uint8)), labels)


def _draw_lines(image: Image.Image, labels: Ints) -> Image.Image:
    border = _border(labels)  # (H, W)
    width = max(round(max(image.size) / LINES), 1)
    dark, light = _grow(border, width), _grow(border, width - 1)
    pixels = np.asarray(image.convert("RGB")).copy()  # (H, W, 3)
    pixels[dark] = pixels[dark] // 4
    pixels[light] = 255
    return Image.fromarray(pixels)


def _border(labels: Ints) -> NDArray[np.bool_]:
    """The pixels whose right or lower neighbour belongs to another token; the edge of the box is none."""
    border = np.zeros(labels.shape, dtype=bool)
    seen = labels > -2
    for axis in (0, 1):
        here = [slice(None)] * 2
        there = [slice(None)] * 2
        here[axis], there[axis] = slice(None, -1), slice(1, None)
        a, b = labels[tuple(here)], labels[tuple(there)]
        border[tuple(here)] |= (a != b) & seen[tuple(here)] & seen[tuple(there)]
    return border


def _grow(mask: NDArray[np.bool_], by: int) -> NDArray[np.bool_]:
    if by < 1:
        return mask
    grown = Image.fromarray(mask.astype(np.uint8)).filter(ImageFilter.MaxFilter(2 * by + 1))
    return np.asarray(grown).astype(bool)


# Pictures that say where the foreground is.

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


# Where a map on the patch grid lies on the picture it came from.
#
# All coordinates are continuous, in pixels, with pixel i covering [i, i + 1): its centre is i + 0.5. A box
# is (left, top, right, bottom) in these coordinates, as in PIL, and need not fall on whole pixels.

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
