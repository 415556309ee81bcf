"""Pictures of segmentations: one colour per class, alone and over the photo."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from visualtokens.data.segmentation import IGNORE
from visualtokens.errors import UserError
from visualtokens.files import write_atomically
from visualtokens.tables import printable

STRENGTH = 0.55  # weight of the class colour; the rest is the photo
# The first classes have the colour-blind safe palette of Okabe and Ito.
_FIRST = ("#E69F00", "#56B4E9", "#CC79A7", "#009E73", "#D55E00", "#F0E442", "#0072B2", "#999999")

Colours = NDArray[np.uint8]  # (n, 3)


def palette(classes: int) -> Colours:
    """Return one colour per class ``(classes, 3)``; it depends on the index of the class only."""
    return _colours()[:classes]


@functools.cache
def _colours() -> Colours:
    """Return 255 colours; each further one is that of a grid which is farthest from all before it."""
    chosen = [list(bytes.fromhex(text[1:])) for text in _FIRST]
    levels = np.arange(16, 256, 24)
    grid = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(-1, 3)  # (1000, 3)
    distance = np.abs(grid[:, None] - np.array(chosen)[None]).sum(2).min(1)  # (1000,)
    while len(chosen) < IGNORE:
        best = grid[distance.argmax()]
        chosen.append(best.tolist())
        distance = np.minimum(distance, np.abs(grid - best).sum(1))
    return np.array(chosen, np.uint8)


def index_image(labels: Tensor | NDArray[np.uint8], *, classes: int) -> Image.Image:
    """Return class indices ``(H, W)`` as an indexed image with the palette of the classes."""
    values = _values(labels)
    image = Image.fromarray(values).convert("L")
    image.putpalette(np.concatenate([palette(classes), np.zeros((256 - classes, 3), np.uint8)]).tobytes())
    return image


def overlay(
    image: Image.Image,
    labels: Tensor | NDArray[np.uint8],
    *,
    classes: Sequence[str],
    strength: float = STRENGTH,
    legend: bool = True,
) -> Image.Image:
    """Return the photo with each pixel tinted by its class, lines between classes, and a legend below.

    Pixels of class 255 keep the colours of the photo. ``labels`` are ``(H, W)``.
    """
    values = _values(labels)  # (H, W)
    if values.shape != (image.height, image.width):
        height, width = values.shape
        raise UserError(f"labels of {height}×{width} do not fit an image of {image.height}×{image.width}")
    table = np.zeros((256, 3), np.uint8)
    table[: len(classes)] = palette(len(classes))
    photo = np.asarray(image.convert("RGB"), np.float32)  # (H, W, 3)
    tinted = (1 - strength) * photo + strength * table[values]
    tinted = np.where((values == IGNORE)[..., None], photo, tinted)
    tinted[_edges(values)] *= 0.35
    picture = Image.fromarray(tinted.round().astype(np.uint8))
    return _with_legend(picture, values, classes) if legend else picture


def save_prediction(
    image: Image.Image, labels: Tensor, *, classes: Sequence[str], out: str | Path, name: str
) -> tuple[Path, Path]:
    """Write ``<name>_overlay.png`` and ``<name>_classes.png`` (class indices); return both paths."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    drawn, indices = folder / f"{name}_overlay.png", folder / f"{name}_classes.png"
    tinted, indexed = overlay(image, labels, classes=classes), index_image(labels, classes=len(classes))
    for path, picture in ((drawn, tinted), (indices, indexed)):
        write_atomically(path, functools.partial(picture.save, format="PNG"))
    return drawn, indices


def _values(labels: Tensor | NDArray[np.uint8]) -> NDArray[np.uint8]:
    values = labels.cpu().numpy() if isinstance(labels, Tensor) else labels
    return values.astype(np.uint8)


def _edges(values: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return the pixels whose right or lower neighbour has another class."""
    edges = np.zeros(values.shape, np.bool_)
    edges[:, :-1] |= values[:, :-1] != values[:, 1:]
    edges[:-1] |= values[:-1] != values[1:]
    return edges


def _with_legend(picture: Image.Image, values: NDArray[np.uint8], classes: Sequence[str]) -> Image.Image:
    """Add the names of the classes in the picture with their shares of the pixels, largest first."""
    counts = np.bincount(values.ravel(), minlength=256)[: len(classes)]
    present = [int(i) for i in np.argsort(-counts, kind="stable") if counts[i]]
    if not present:
        return picture
    colours = palette(len(classes))
    size = 14
    font = ImageFont.load_default(size)
    entries = [f"{printable(classes[i])} {counts[i] / values.size:.0%}" for i in present]
    width = max(picture.width, *(int(font.getlength(text)) + 3 * size for text in entries))
    places, right, row = [], size // 2, 0
    for text in entries:
        length = int(font.getlength(text)) + 2 * size
        if right > size // 2 and right + length > width:
            right, row = size // 2, row + 1
        places.append((right, picture.height + size // 2 + row * 2 * size))
        right += length + size
    out = Image.new("RGB", (width, picture.height + (row + 1) * 2 * size), "white")
    out.paste(picture)
    draw = ImageDraw.Draw(out)
    for i, text, (x, y) in zip(present, entries, places, strict=True):
        draw.rectangle((x, y + 2, x + size - 2, y + size), fill=tuple(colours[i].tolist()), outline="black")
        draw.text((x + size + 4, y), text, fill="black", font=font)
    return out
