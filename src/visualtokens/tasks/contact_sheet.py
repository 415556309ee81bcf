"""A contact sheet of a dataset: images of every split with their labels, objects or masks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch.nn import functional as F

from visualtokens.data.base import AnnotatedImages, ImageStream, Share
from visualtokens.data.decode import BadImage, decode_image
from visualtokens.data.detection import Objects
from visualtokens.data.inspection import Splits, evenly_spread
from visualtokens.data.segmentation import Colour, Mask
from visualtokens.progress import count
from visualtokens.tables import printable
from visualtokens.tasks.detect.detections import draw, truth
from visualtokens.tasks.segment.pictures import overlay, palette

COLUMNS = 5
TRAIN_ROWS = 3  # of the training split; the others have one
TILE = 300  # pixels
FONT = 14
MARGIN = 10
MAX_LEGEND = 60  # classes in the legend of segmentation
PIXELATED = 4  # images enlarged at least this much show their pixels


class _Tile(NamedTuple):
    picture: Image.Image
    title: str  # the label of the image
    name: str  # of its file


def contact_sheet(splits: Splits) -> Image.Image:
    """Return one picture with images of all splits, evenly spread, and what is annotated on them.

    Images that cannot be read are left out.
    """
    rows: list[tuple[str, list[_Tile]]] = []
    shown = np.zeros(256, np.bool_)  # classes of pixels
    for split, dataset in splits.datasets.items():
        wanted = COLUMNS * (TRAIN_ROWS if split == "train" else 1)
        tiles = [_tile(item, splits, shown) for item in itertools.islice(_readable(dataset, wanted), wanted)]
        for start in range(0, len(tiles), COLUMNS):
            heading = f"{split}, {len(tiles)} of {count(len(dataset), 'image')}" if start == 0 else ""
            rows.append((heading, tiles[start : start + COLUMNS]))
    legend: dict[str, Colour] = {}
    if splits.task == "segment":
        colours = palette(len(splits.classes), _own_colours(splits)).tolist()
        seen = np.flatnonzero(shown[: len(splits.classes)])[:MAX_LEGEND].tolist()
        legend = {printable(splits.classes[i]): tuple(colours[i]) for i in seen}
    return _compose(rows, legend)


def _own_colours(splits: Splits) -> Sequence[Colour] | None:
    """Return the colours of the classes that a segmentation dataset has itself."""
    return getattr(splits.datasets["train"], "colours", None)


def _readable(dataset: AnnotatedImages[Any], wanted: int) -> Iterator[tuple[str, Image.Image, Any]]:
    """Yield name, image and annotation of readable images, ``wanted`` evenly spread ones before others."""
    if isinstance(dataset, ImageStream):
        for encoded in dataset.read(Share()):
            try:
                yield encoded.name, decode_image(BytesIO(encoded.data), encoded.name), encoded.label
            except BadImage:
                continue
        return
    first = evenly_spread(len(dataset), wanted)
    for index in dict.fromkeys([*first, *range(len(dataset))]):
        try:
            image, annotation = dataset[index]
        except BadImage:
            continue
        yield dataset.path(index), image, annotation


def _tile(item: tuple[str, Image.Image, Any], splits: Splits, shown: np.ndarray) -> _Tile:
    path, image, annotation = item
    scale = TILE / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    small = image.resize(size, Image.Resampling.NEAREST if scale >= PIXELATED else Image.Resampling.BICUBIC)
    name = Path(path).name
    if splits.task == "segment":
        shown[np.unique(annotation)] = True
        return _Tile(_with_mask(small, annotation, splits), "", name)
    if splits.task == "detect":
        objects = count(len(annotation), "object")
        return _Tile(_with_objects(small, annotation, image.size, splits.classes), objects, name)
    return _Tile(small, splits.classes[annotation], name)


def _with_mask(image: Image.Image, mask: Mask, splits: Splits) -> Image.Image:
    resized = np.asarray(Image.fromarray(mask).resize(image.size, Image.Resampling.NEAREST))
    return overlay(image, resized, classes=splits.classes, colours=_own_colours(splits), legend=False)


def _with_objects(
    image: Image.Image, objects: Objects, size: tuple[int, int], classes: list[str]
) -> Image.Image:
    """Return the image with the objects of the image of ``size`` (width, height) that it was resized from."""
    factors = objects.boxes.new_tensor((image.width / size[0], image.height / size[1])).repeat(2)
    masks = objects.masks
    if masks is not None and len(masks):
        masks = F.interpolate(masks[None].float(), (image.height, image.width), mode="nearest")[0] > 0.5
    # Crowds and difficult objects are drawn as classes of their own.
    names = [*classes, *(f"{name} (excluded)" for name in classes)]
    labels = objects.labels + len(classes) * objects.crowd
    return draw(image, truth(objects.boxes * factors, labels, masks), names, scores=False, min_side=1)


# Layout.


def _compose(rows: list[tuple[str, list[_Tile]]], legend: Mapping[str, Colour]) -> Image.Image:
    font, line = ImageFont.load_default(FONT), FONT + 4
    width = COLUMNS * (TILE + MARGIN) + MARGIN
    heights = [
        (2 * line if heading else 0) + max(tile.picture.height for tile in tiles) + 2 * line + MARGIN
        for heading, tiles in rows
    ]
    places, bottom = _legend_places(list(legend), font, width)
    sheet = Image.new("RGB", (width, MARGIN + sum(heights) + bottom), "white")
    pen = ImageDraw.Draw(sheet)
    y = MARGIN
    for (heading, tiles), height in zip(rows, heights, strict=True):
        top = y
        if heading:
            pen.text((MARGIN, top), heading, fill="black", font=ImageFont.load_default(FONT + 4))
            top += 2 * line
        for column, tile in enumerate(tiles):
            x = MARGIN + column * (TILE + MARGIN)
            sheet.paste(tile.picture, (x, top))
            texts = [(text, fill) for text, fill in ((tile.title, "black"), (tile.name, "#666666")) if text]
            for i, (text, fill) in enumerate(texts):
                place = (x, top + tile.picture.height + 2 + i * line)
                pen.text(place, _shortened(printable(text), font), fill=fill, font=font)
        y += height
    for (name, colour), (left, top) in zip(legend.items(), places, strict=True):
        box = (left, y + top, left + FONT, y + top + FONT)
        pen.rectangle(box, fill=colour, outline="black")
        pen.text((left + FONT + 6, y + top - 1), name, fill="black", font=font)
    return sheet


def _legend_places(
    names: list[str], font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int
) -> tuple[list[tuple[int, int]], int]:
    """Return the place of each entry, in lines from left to right, and the height of all."""
    places, x, y = [], MARGIN, 0
    for name in names:
        length = FONT + 6 + int(font.getlength(name)) + 2 * MARGIN
        if x > MARGIN and x + length > width:
            x, y = MARGIN, y + FONT + 8
        places.append((x, y))
        x += length
    return places, y + FONT + 8 + MARGIN if names else 0


def _shortened(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Return the text, or as much of its end as fits below an image."""
    if font.getlength(text) <= TILE:
        return text
    while text and font.getlength(f"…{text}") > TILE:
        text = text[1:]
    return f"…{text}"
