"""Small datasets of shapes on noise, drawn by the journeys: folders of classes, masks, COCO annotations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "triangle")
SPLITS = {"train": 30, "val": 8}  # images per class


def shape(kind: str, rng: np.random.Generator, *, side: int = 64) -> tuple[Image.Image, Image.Image]:
    """A shape of random size, place and colour on noise, and its mask of 0 and 255."""
    image = Image.fromarray(rng.integers(0, 90, (side, side, 3), dtype=np.uint8))
    mask = Image.new("L", (side, side))
    radius = int(rng.integers(side // 6, side // 3))
    x, y = (int(v) for v in rng.integers(radius, side - radius, 2))
    colour = tuple(int(v) for v in rng.integers(150, 256, 3))
    box = (x - radius, y - radius, x + radius, y + radius)
    for canvas, fill in ((image, colour), (mask, 255)):
        draw = ImageDraw.Draw(canvas)
        if kind == "circle":
            draw.ellipse(box, fill=fill)
        elif kind == "square":
            draw.rectangle(box, fill=fill)
        else:
            draw.polygon([(x, box[1]), (box[0], box[3]), (box[2], box[3])], fill=fill)
    return image, mask


def photos(folder: Path, *, side: int = 64) -> None:
    """``train/<class>/*.jpg`` and ``val/<class>/*.jpg``."""
    rng = np.random.default_rng(0)
    for split, count in SPLITS.items():
        for kind in SHAPES:
            (folder / split / kind).mkdir(parents=True)
            for i in range(count):
                shape(kind, rng, side=side)[0].save(folder / split / kind / f"{i:03}.jpg")


def scenes(folder: Path) -> None:
    """``images/train/*.jpg``, ``masks/train/*.png`` and ``classes.txt``; class 0 is the background."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    (folder / "classes.txt").write_text("\n".join(("background", *SHAPES)) + "\n")
    for split, count in SPLITS.items():
        for part in ("images", "masks"):
            (folder / part / split).mkdir(parents=True)
        for i in range(count):
            index = i % len(SHAPES)
            image, mask = shape(SHAPES[index], rng)
            image.save(folder / "images" / split / f"{i:03}.jpg")
            indices = np.where(np.asarray(mask) > 0, index + 1, 0).astype(np.uint8)
            Image.fromarray(indices).save(folder / "masks" / split / f"{i:03}.png")


def objects(folder: Path) -> None:
    """COCO's layout, with a box and a polygon for each shape."""
    rng = np.random.default_rng(0)
    (folder / "annotations").mkdir(parents=True)
    for split, count in SPLITS.items():
        (folder / f"{split}2017").mkdir()
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for i in range(count):
            index = i % len(SHAPES)
            image, mask = shape(SHAPES[index], rng)
            image.save(folder / f"{split}2017" / f"{i:03}.jpg")
            left, top, right, bottom = mask.getbbox() or (0, 0, 1, 1)
            images.append(dict(id=i, file_name=f"{i:03}.jpg", width=image.width, height=image.height))
            outline = [left, top, right, top, right, bottom, left, bottom]
            width, height = right - left, bottom - top
            annotations.append(
                dict(
                    id=i,
                    image_id=i,
                    category_id=index + 1,
                    bbox=[left, top, width, height],
                    area=width * height,
                    iscrowd=0,
                    segmentation=[outline],
                )
            )
        categories = [dict(id=i + 1, name=name) for i, name in enumerate(SHAPES)]
        content = dict(images=images, annotations=annotations, categories=categories)
        file = folder / "annotations" / f"instances_{split}2017.json"
        file.write_text(json.dumps(content))


def photo(path: Path, kind: str = "circle", *, side: int = 64) -> None:
    """One more image of a shape."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape(kind, np.random.default_rng(1), side=side)[0].save(path)
