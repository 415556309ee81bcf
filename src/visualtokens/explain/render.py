"""Drawing on images: heat maps, token borders and mosaics, numbered regions.

Heat is drawn with a perceptually uniform colour map over the greyscale image, at one strength everywhere. So
lighter always means more heat, also in greyscale print and for colour-blind readers.

Coordinates are continuous pixels: pixel i covers [i, i + 1), its centre is i + 0.5. A box is (left, top,
right, bottom), as in PIL, and need not fall on whole pixels.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from visualtokens.explain.importance import Floats
from visualtokens.explain.layers import Ints, Layer

if TYPE_CHECKING:
    from visualtokens.explain.explanation import Explanation

Box = tuple[float, float, float, float]
Bools = NDArray[np.bool_]

COLORMAP = "magma"
STRENGTH = 0.6  # the share of heat in a pixel; the rest is the image
BRIGHTEST = 0.99  # the quantile of a soft map that is drawn brightest
BRIGHTEN = 0.6  # gamma of the greyscale image, which the dark end of the colour map would hide
DIMMED = 0.35  # brightness of pixels outside the crop and of dropped patches
LINE_SCALE = 480  # a border is drawn one pixel wider on either side per this many pixels of the longer side
MAX_ASPECT = 4  # of a drawn image; a longer one is cut to the part around the crop
MAX_LAYERS = 12  # in one figure or page
OUTSIDE = -2  # the label of a pixel outside the box
FOR, AGAINST = (38, 110, 205), (206, 84, 20)  # discs of regions that raise and lower the score
FOCUS = (255, 214, 10)  # the outline of the area or object that is explained
SHADE = 0.45  # brightness of regions that are not numbered


# From the patch grid to pixels.


def place(heat: Floats, box: Box, size: tuple[int, int]) -> tuple[Floats, Bools]:
    """Upsample ``heat (h, w)`` into ``box`` on a canvas of ``size`` = (width, height).

    Returns the canvas ``(height, width)``, zero outside the box, and which pixels have their centre inside
    it. The interpolation is that of ``interpolate(..., mode="bilinear", align_corners=False)``.
    """
    x = _relative(size[0], box[0], box[2])  # (width,)
    y = _relative(size[1], box[1], box[3])  # (height,)
    inside = _inside(x, y)
    rows, columns = _bilinear(y, heat.shape[0]), _bilinear(x, heat.shape[1])  # (height, h), (width, w)
    return np.where(inside, rows @ heat @ columns.T, 0).astype(np.float32), inside


def upsample(heat: Floats, height: int, width: int) -> Floats:
    """``(height, width)``: the ``heat (h, w)`` of patches that cover the whole image, per pixel."""
    return place(heat, (0, 0, width, height), (width, height))[0]


def place_labels(labels: Ints, box: Box, size: tuple[int, int]) -> Ints:
    """``(height, width)``: the label of ``labels (h, w)`` below each pixel, -2 outside the box."""
    x = _relative(size[0], box[0], box[2])  # (width,)
    y = _relative(size[1], box[1], box[3])  # (height,)
    row = np.clip((y * labels.shape[0]).astype(int), 0, labels.shape[0] - 1)
    column = np.clip((x * labels.shape[1]).astype(int), 0, labels.shape[1] - 1)
    return np.where(_inside(x, y), labels[row[:, None], column], OUTSIDE)


def _relative(pixels: int, start: float, end: float) -> Floats:
    """``(pixels,)``: the position of each pixel's centre, 0 at start and 1 at end."""
    return (np.arange(pixels) + 0.5 - start) / (end - start)


def _inside(x: Floats, y: Floats) -> Bools:
    return ((y >= 0) & (y <= 1))[:, None] & ((x >= 0) & (x <= 1))[None]  # (height, width)


def _bilinear(positions: Floats, count: int) -> Floats:
    """``(len(positions), count)``: linear interpolation weights between ``count`` cells that span 0 to 1."""
    centres = np.clip(positions * count - 0.5, 0, count - 1)  # in units of cell centres
    return np.maximum(0, 1 - np.abs(centres[:, None] - np.arange(count)))


def scale_box(box: Box, before: tuple[int, int], after: tuple[int, int]) -> Box:
    """The box after its image is resized from one (width, height) to another."""
    sx, sy = after[0] / before[0], after[1] / before[1]
    return box[0] * sx, box[1] * sy, box[2] * sx, box[3] * sy


# Heat.


def overlay(
    image: Image.Image, heat: Floats, *, box: Box | None = None, strength: float = STRENGTH
) -> Image.Image:
    """Draw ``heat (h, w)``, from 0 to 1, over the ``box`` of the image (default: all of it); dim the rest."""
    canvas, inside = place(heat, box or (0, 0, *image.size), image.size)  # (H, W), (H, W)
    grey = np.asarray(image.convert("L"), dtype=np.float32)[..., None] / 255  # (H, W, 1)
    mixed = (1 - strength) * grey**BRIGHTEN + strength * _colours(canvas)  # (H, W, 3)
    mixed = np.where(inside[..., None], mixed, DIMMED * grey)
    return Image.fromarray((mixed * 255).round().astype(np.uint8))


def colour_stops(count: int = 9) -> list[str]:
    """The colour map from 0 to 1, as CSS colours."""
    rgb = (_colours(np.linspace(0, 1, count, dtype=np.float32)) * 255).round().astype(int)  # (count, 3)
    return [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in rgb]


def _colours(values: Floats) -> Floats:
    """``(..., 3)``: RGB from 0 to 1."""
    from matplotlib import colormaps

    return colormaps[COLORMAP](values)[..., :3].astype(np.float32)


# Tokens as regions. A border is white between two dark lines, so it is visible on any image.


def draw_borders(image: Image.Image, assignment: Ints, *, box: Box, token: int | None = None) -> Image.Image:
    """Draw the borders between the tokens of ``assignment (h, w)``, or only those around one token."""
    labels = place_labels(assignment, box, image.size)  # (H, W)
    if token is not None:
        labels = np.where(labels == OUTSIDE, OUTSIDE, labels == token)
    border = _border(labels)  # (H, W)
    width = max(round(max(image.size) / LINE_SCALE), 1)
    dark, light = _dilate(border, width), _dilate(border, width - 1)
    pixels = np.asarray(image.convert("RGB")).copy()  # (H, W, 3)
    pixels[dark] = pixels[dark] // 4
    pixels[light] = 255
    return Image.fromarray(pixels)


def draw_mosaic(image: Image.Image, assignment: Ints, *, box: Box) -> Image.Image:
    """Fill the patches of each token with their mean colour; dim dropped patches; draw the borders."""
    labels = place_labels(assignment, box, image.size)  # (H, W)
    pixels = np.asarray(image.convert("RGB"), dtype=np.float64)  # (H, W, 3)
    kept = labels >= 0
    count = np.bincount(labels[kept])  # (K,)
    sums = np.stack([np.bincount(labels[kept], pixels[kept, c]) for c in range(3)], axis=1)  # (K, 3)
    means = sums / np.maximum(count, 1)[:, None]
    filled = DIMMED * np.broadcast_to(pixels.mean(2, keepdims=True), pixels.shape).copy()
    filled[kept] = means[labels[kept]]
    return draw_borders(Image.fromarray(filled.round().astype(np.uint8)), assignment, box=box)


def _border(labels: Ints) -> Bools:
    """``(H, W)``: the pixels whose right or lower neighbour has another label, both inside the box."""
    border = np.zeros(labels.shape, dtype=bool)
    seen = labels != OUTSIDE
    border[:-1] |= (labels[:-1] != labels[1:]) & seen[:-1] & seen[1:]
    border[:, :-1] |= (labels[:, :-1] != labels[:, 1:]) & seen[:, :-1] & seen[:, 1:]
    return border


def _dilate(mask: Bools, radius: int) -> Bools:
    if radius < 1:
        return mask
    dilated = Image.fromarray(mask.astype(np.uint8)).filter(ImageFilter.MaxFilter(2 * radius + 1))
    return np.asarray(dilated).astype(bool)


# Images for display.


def frame_crop(image: Image.Image, box: Box) -> Image.Image:
    """Dim the image outside the box and draw a thin line around it."""
    _, inside = place(np.zeros((1, 1), dtype=np.float32), box, image.size)
    if inside.all():
        return image
    pixels = np.asarray(image, dtype=np.float32)  # (H, W, 3)
    dimmed = np.where(inside[..., None], pixels, DIMMED * pixels)
    out = Image.fromarray(dimmed.round().astype(np.uint8))
    width, height = image.size
    left, top = max(round(box[0]), 0), max(round(box[1]), 0)
    right, bottom = min(round(box[2]), width) - 1, min(round(box[3]), height) - 1
    thickness = max(width, height) // 160 or 1
    ImageDraw.Draw(out).rectangle((left, top, right, bottom), outline="white", width=thickness)
    return out


def resize_for_display(image: Image.Image, box: Box, *, side: int) -> tuple[Image.Image, Box]:
    """The image with its longer side near ``side`` pixels, and the box on it.

    Small images are enlarged by a whole factor without smoothing, so that their pixels stay visible below
    the heat map.
    """
    image, box = _limit_aspect(image, box)
    factor = side / max(image.size)
    if factor >= 2:
        after = image.width * int(factor), image.height * int(factor)
        resized = image.resize(after, Image.Resampling.NEAREST)
    else:
        after = max(round(image.width * factor), 1), max(round(image.height * factor), 1)
        # reducing_gap halves a large photo first: the same result to the eye, much faster
        resized = image.resize(after, Image.Resampling.LANCZOS, reducing_gap=3.0)
    return resized, scale_box(box, image.size, after)


def cut_to_box(image: Image.Image, box: Box) -> tuple[Image.Image, Box]:
    """The part of the image inside the box, and the box on it."""
    left, top = max(round(box[0]), 0), max(round(box[1]), 0)
    part = image.crop((left, top, min(round(box[2]), image.width), min(round(box[3]), image.height)))
    return part, (box[0] - left, box[1] - top, box[2] - left, box[3] - top)


def _limit_aspect(image: Image.Image, box: Box) -> tuple[Image.Image, Box]:
    """Cut a very long image to the part around the box, which would otherwise be too small to see."""
    width, height = image.size
    across, down = min(width, MAX_ASPECT * height), min(height, MAX_ASPECT * width)
    if (across, down) == image.size:
        return image, box
    left = min(max(round((box[0] + box[2] - across) / 2), 0), width - across)
    top = min(max(round((box[1] + box[3] - down) / 2), 0), height - down)
    part = image.crop((left, top, left + across, top + down))
    return part, (box[0] - left, box[1] - top, box[2] - left, box[3] - top)


def data_uri(image: Image.Image) -> str:
    """The image as a ``data:`` URI for an HTML page."""
    buffer = io.BytesIO()
    # JPEG: as PNG, a page of photos would be ten times as large
    image.save(buffer, format="JPEG", quality=90, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


# Numbered regions.


def draw_regions(
    image: Image.Image, regions: Ints, numbered: Sequence[tuple[int, bool]], *, box: Box
) -> Image.Image:
    """The image with some of its ``regions (h, w)`` lit, outlined and numbered from 1; the others are shaded.

    ``numbered`` are the regions in the order of their numbers, each with whether it raises the score.
    """
    labels = place_labels(regions, box, image.size)  # (H, W)
    chosen = [k for k, _ in numbered]
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)  # (H, W, 3)
    grey = pixels.mean(2, keepdims=True)
    lit = np.isin(labels, chosen)[..., None]
    shaded = Image.fromarray(np.where(lit, pixels, SHADE * (pixels + grey) / 2).round().astype(np.uint8))
    drawn = draw_borders(shaded, np.where(np.isin(regions, chosen), regions, -1), box=box)
    radius = max(max(image.size) / 30, 7)
    placed: list[Floats] = []
    for number, (k, raises) in enumerate(numbered, start=1):
        places = _disc_places(inner_cells(regions == k), regions.shape, box, image.size, radius)  # (n, 2)
        room = [min((np.hypot(*(one - other)) for other in placed), default=np.inf) for one in places]
        free = [one for one, distance in zip(places, room, strict=True) if distance > 2 * radius]
        placed.append(free[0] if free else places[int(np.argmax(room))])
        _draw_number(drawn, number, placed[-1], radius, FOR if raises else AGAINST)
    return drawn


def _disc_places(
    cells: Ints, grid: tuple[int, ...], box: Box, size: tuple[int, int], radius: float
) -> Floats:
    """``(n, 2)``: x and y of the cells ``(n, 2)``, moved so that a disc stays inside the image."""
    share = (cells[:, ::-1] + 0.5) / np.array(grid[::-1])  # x, y from 0 to 1
    at = np.array(box[:2]) + share * (np.array(box[2:]) - np.array(box[:2]))
    return np.clip(at, radius + 1, np.maximum(np.array(size) - radius - 2, radius + 1))


def inner_cells(mask: Bools) -> Ints:
    """``(n, 2)``: row and column of the cells of ``mask (h, w)``, the farthest from its border first.

    Of cells that are equally far, the one nearest to their middle comes first.
    """
    depth = np.zeros(mask.shape, dtype=int)
    left = np.pad(mask, 1)
    while left.any():
        depth += left[1:-1, 1:-1]
        inner = left[1:-1, 1:-1] & left[:-2, 1:-1] & left[2:, 1:-1] & left[1:-1, :-2] & left[1:-1, 2:]
        left = np.pad(inner, 1)
    cells = np.argwhere(mask)
    depths = depth[mask]
    middle = cells[depths == depths.max()].mean(0)
    return cells[np.lexsort((((cells - middle) ** 2).sum(1), -depths))]


def _draw_number(
    image: Image.Image, number: int, at: Floats, radius: float, colour: tuple[int, int, int]
) -> None:
    """Draw a number on a disc, in place."""
    x, y = at.tolist()
    pen = ImageDraw.Draw(image)
    disc = (x - radius, y - radius, x + radius, y + radius)
    pen.ellipse(disc, fill=colour, outline="white", width=max(round(radius / 8), 1))
    font = ImageFont.load_default(radius * 1.35)
    pen.text((x, y), str(number), fill="white", font=font, anchor="mm")


def draw_focus(image: Image.Image, focus: Bools, *, box: Box) -> Image.Image:
    """Outline the ``focus (H, W)``, the area or object that is explained, in yellow."""
    border = _border(place_labels(focus.astype(int), box, image.size))  # (H, W)
    width = max(round(max(image.size) / LINE_SCALE), 1)
    pixels = np.asarray(image.convert("RGB")).copy()
    pixels[_dilate(border, width + 1)] = 20
    pixels[_dilate(border, width)] = FOCUS
    return Image.fromarray(pixels)


# Explanations.


def draw_numbered(explanation: Explanation, image: Image.Image, box: Box) -> Image.Image:
    """The image with the regions that the page lists, and the area or object that is explained."""
    numbered = [(k, bool(explanation.values[k] >= 0)) for k in explanation.listed]
    shown = frame_crop(image, box)
    if explanation.focus is not None:
        shown = draw_focus(shown, explanation.focus, box=box)
    return draw_regions(shown, explanation.regions, numbered, box=box)


def draw_subject(explanation: Explanation, image: Image.Image, box: Box) -> Image.Image:
    """The image with its crop, and the area or object that is explained."""
    framed = frame_crop(image, box)
    return framed if explanation.focus is None else draw_focus(framed, explanation.focus, box=box)


def draw_cluster(explanation: Explanation, k: int, image: Image.Image, box: Box) -> Image.Image:
    """The map of cluster k as heat; with the token's border where patches belong to one token each."""
    heat = explanation.maps[k]
    if explanation.form == "soft" or explanation.of == "attention":
        return overlay(image, clip_peaks(heat), box=box)
    return draw_borders(overlay(image, heat, box=box), explanation.regions, box=box, token=k)


def clip_peaks(heat: Floats) -> Floats:
    """``heat`` relative to its 99th percentile, at most 1.

    In a soft cluster over thousands of patches, one patch can weigh a hundred times as much as the others,
    which would all be drawn black.
    """
    top = float(np.quantile(heat, BRIGHTEST))
    return np.minimum(heat / top, 1) if top > 0 else heat


def draw_layer(layer: Layer, image: Image.Image, box: Box) -> Image.Image:
    """The tokens of a layer: a mosaic if the grouping is hard, otherwise the borders of the super tokens."""
    if layer.form == "hard":
        return draw_mosaic(image, layer.assignment, box=box)
    return draw_borders(frame_crop(image, box), layer.assignment, box=box)


def drawn_layers(explanation: Explanation) -> list[Layer]:
    """The layers that divide the patches: all, or an even selection with the first and the last."""
    layers = [layer for layer in explanation.layers if layer.form != "soft"]
    if len(layers) <= MAX_LAYERS:
        return layers
    return [layers[round(i)] for i in np.linspace(0, len(layers) - 1, MAX_LAYERS)]


def module_name(tap: str) -> str:
    """The module that a tap belongs to."""
    return "the model" if tap == "tap" else tap.removesuffix(".tap").removesuffix(".reduction")


def layer_counts(layer: Layer) -> str:
    """The numbers of tokens, patches and dropped patches."""
    dropped = f", {layer.dropped} dropped" if layer.dropped else ""
    return f"{layer.tokens} tokens for {layer.assignment.size} patches{dropped}"


def format_change(explanation: Explanation, k: int) -> str:
    """The change of the score when cluster k is masked, such as "−0.42"."""
    return signed(-float(explanation.values[k]))


def signed(value: float, decimals: int = 2) -> str:
    """A number with its sign, such as "−0.42"."""
    text = f"{value:+z.{decimals}f}".replace("-", "−")
    return text if float(text[1:]) else text[1:]
