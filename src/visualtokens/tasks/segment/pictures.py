"""Pictures of segmentations: one colour per class, alone and over the photo."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from visualtokens.data.preprocess import IGNORE, Colour
from visualtokens.errors import UserError
from visualtokens.files import write_atomically
from visualtokens.tables import printable

if TYPE_CHECKING:
    from torch import Tensor

STRENGTH = 0.55  # weight of the class colour; the rest is the photo
# Lightness and distances are those of CIELAB, where white is 100.
DARK = 35.0  # colours of a dataset that are darker than this look black on asphalt or in shadow
LIGHT = (46.0, 95.0)  # lightness of the colours that are chosen here
GAP = 28.0  # distance between a lightened colour and all others
# The first classes have the colour-blind safe palette of Okabe and Ito.
_FIRST = ("#E69F00", "#56B4E9", "#CC79A7", "#009E73", "#D55E00", "#F0E442", "#0072B2", "#999999")

Colours = NDArray[np.uint8]  # (n, 3)


def palette(classes: int, own: Sequence[Colour] | None = None) -> Colours:
    """Return one colour per class ``(classes, 3)``.

    ``own`` are the colours of the dataset, of which those that are nearly black are replaced by the most
    similar light ones that no other class has. Without them, a colour depends on the index of the class only.
    """
    if own is None:
        return _colours()[:classes]
    colours = np.array(own, np.uint8).reshape(-1, 3)
    places = _lab(colours)  # (classes, 3)
    grid, grid_places = _grid()
    for i in np.flatnonzero(places[:, 0] < DARK):
        others = np.delete(places, i, axis=0)
        gap = np.linalg.norm(grid_places[:, None] - others[None], axis=2).min(1, initial=np.inf)  # (grid,)
        change = np.linalg.norm(grid_places - _lab(_lightened(colours[i])[None]), axis=1)
        best = np.where(gap >= GAP, change, np.inf).argmin() if (gap >= GAP).any() else gap.argmax()
        colours[i], places[i] = grid[best], grid_places[best]
    return colours


def _lightened(colour: Colours) -> Colours:
    """Return a dark colour ``(3,)`` made brighter, and then mixed with white, until it is light enough."""
    steps = np.linspace(0, 1, 33)[:, None]  # (steps, 1)
    bright = colour * (255 / colour.max()) if colour.any() else np.full(3, 255.0)
    path = np.concatenate([colour + steps * (bright - colour), bright + steps * (255 - bright)])
    path = path.round().astype(np.uint8)  # (2 steps, 3)
    return path[(_lab(path)[:, 0] >= LIGHT[0]).argmax()]


@functools.cache
def _colours() -> Colours:
    """Return 255 light colours; each further one is that of a grid which is farthest from all before it."""
    first = np.array([list(bytes.fromhex(text[1:])) for text in _FIRST], np.uint8)
    grid, places = _grid()
    chosen = first.tolist()
    distance = np.linalg.norm(places[:, None] - _lab(first)[None], axis=2).min(1)  # (grid,)
    while len(chosen) < IGNORE:
        best = distance.argmax()
        chosen.append(grid[best].tolist())
        distance = np.minimum(distance, np.linalg.norm(places - places[best], axis=1))
    return np.array(chosen, np.uint8)


@functools.cache
def _grid() -> tuple[Colours, NDArray[np.float64]]:
    """Return light colours ``(n, 3)`` on a grid, and their places in CIELAB."""
    levels = np.linspace(0, 255, 12).round().astype(np.uint8)
    grid = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(-1, 3)
    places = _lab(grid)
    light = (places[:, 0] >= LIGHT[0]) & (places[:, 0] <= LIGHT[1])
    return grid[light], places[light]


def _lab(colours: Colours) -> NDArray[np.float64]:
    """Return sRGB colours ``(n, 3)`` in CIELAB, where distances are about those that people see."""
    c = colours / 255
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    matrix = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = linear @ matrix.T / matrix.sum(1)  # (n, 3), white is 1
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)


def index_image(
    labels: Tensor | NDArray[np.uint8], *, classes: int, colours: Sequence[Colour] | None = None
) -> Image.Image:
    """Return class indices ``(H, W)`` as an indexed image with the palette of the classes."""
    values = _values(labels)
    image = Image.fromarray(values).convert("L")
    rest = np.zeros((256 - classes, 3), np.uint8)
    image.putpalette(np.concatenate([palette(classes, colours), rest]).tobytes())
    return image


def overlay(
    image: Image.Image,
    labels: Tensor | NDArray[np.uint8],
    *,
    classes: Sequence[str],
    colours: Sequence[Colour] | None = None,
    strength: float = STRENGTH,
    legend: bool = True,
) -> Image.Image:
    """Return the photo with each pixel tinted by its class, lines between classes, and a legend below.

    Pixels of class 255 keep the colours of the photo. ``labels`` are ``(H, W)``, ``colours`` those of the
    dataset (see :func:`palette`).
    """
    values = _values(labels)  # (H, W)
    if values.shape != (image.height, image.width):
        height, width = values.shape
        raise UserError(f"labels of {height}×{width} do not fit an image of {image.height}×{image.width}")
    shown = palette(len(classes), colours)
    table = np.zeros((256, 3), np.uint8)
    table[: len(classes)] = shown
    photo = np.asarray(image.convert("RGB"), np.float32)  # (H, W, 3)
    tinted = (1 - strength) * photo + strength * table[values]
    tinted = np.where((values == IGNORE)[..., None], photo, tinted)
    tinted[_edges(values)] *= 0.35
    picture = Image.fromarray(tinted.round().astype(np.uint8))
    return _with_legend(picture, values, classes, shown) if legend else picture


def save_prediction(
    image: Image.Image,
    labels: Tensor | NDArray[np.uint8],
    *,
    classes: Sequence[str],
    out: str | Path,
    name: str,
    colours: Sequence[Colour] | None = None,
) -> tuple[Path, Path]:
    """Write ``<name>_overlay.png`` and ``<name>_classes.png`` (class indices); return both paths."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    drawn, indices = folder / f"{name}_overlay.png", folder / f"{name}_classes.png"
    tinted = overlay(image, labels, classes=classes, colours=colours)
    indexed = index_image(labels, classes=len(classes), colours=colours)
    for path, picture in ((drawn, tinted), (indices, indexed)):
        write_atomically(path, functools.partial(picture.save, format="PNG"))
    return drawn, indices


def _values(labels: Tensor | NDArray[np.uint8]) -> NDArray[np.uint8]:
    values = labels if isinstance(labels, np.ndarray) else labels.cpu().numpy()
    return values.astype(np.uint8)


def _edges(values: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return the pixels whose right or lower neighbour has another class."""
    edges = np.zeros(values.shape, np.bool_)
    edges[:, :-1] |= values[:, :-1] != values[:, 1:]
    edges[:-1] |= values[:-1] != values[1:]
    return edges


def _with_legend(
    picture: Image.Image, values: NDArray[np.uint8], classes: Sequence[str], colours: Colours
) -> Image.Image:
    """Add the names of the classes in the picture with their shares of the pixels, largest first."""
    counts = np.bincount(values.ravel(), minlength=256)[: len(classes)]
    present = [int(i) for i in np.argsort(-counts, kind="stable") if counts[i]]
    if not present:
        return picture
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
