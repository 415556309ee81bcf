"""Tokens as regions of a picture: their borders, and a mosaic of what each stands for.

A line is white between two dark ones, so it shows on any photo and on a grey print.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from visualtokens.explain.geometry import Box, cells
from visualtokens.explain.layers import Ints

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
