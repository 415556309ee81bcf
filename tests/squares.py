"""A small dataset in several layouts: bright and dark squares on grey, and one image without any."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

HEIGHT, WIDTH = 64, 80
CLASSES = ["bright", "dark", "never there"]


@dataclass(frozen=True)
class Square:
    label: int
    left: int
    top: int
    side: int

    @property
    def box(self) -> tuple[int, int, int, int]:
        return self.left, self.top, self.left + self.side, self.top + self.side


def draw_squares(train: int, val: int) -> Iterator[tuple[str, str, Image.Image, list[Square]]]:
    """Split, name, image and objects of every image; the first image of a split has no objects."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for number in range(count):
            pixels = rng.normal(128, 8, (HEIGHT, WIDTH, 3))
            squares = []
            for place in range(0 if number == 0 else 2):
                side = int(rng.integers(20, 34))
                left = 40 * place + int(rng.integers(0, 40 - side + 1))
                top = int(rng.integers(0, HEIGHT - side + 1))
                label = int(rng.integers(2))
                pixels[top : top + side, left : left + side] += 90 - 180 * label
                squares.append(Square(label, left, top, side))
            yield split, str(number), Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), squares


def write_squares(root: Path, *, train: int = 16, val: int = 4) -> str:
    """Write the images and annotations in COCO's layout; gives the name of the dataset."""
    documents: dict[str, dict[str, Any]] = {}
    for split, name, image, squares in draw_squares(train, val):
        document = documents.setdefault(split, {"images": [], "annotations": []})
        number = int(name)
        document["images"].append(
            {"id": number, "file_name": f"{name}.png", "width": WIDTH, "height": HEIGHT}
        )
        for square in squares:
            left, top, right, bottom = square.box
            document["annotations"].append(
                {
                    "id": len(document["annotations"]) + 1,
                    "image_id": number,
                    "category_id": square.label + 1,
                    "bbox": [left, top, square.side, square.side],
                    "segmentation": [[left, top, right, top, right, bottom, left, bottom]],
                    "area": square.side**2,
                    "iscrowd": 0,
                }
            )
        save(image, root / f"{split}2017" / f"{name}.png")
    (root / "annotations").mkdir(parents=True)
    for split, document in documents.items():
        document["categories"] = [{"id": i + 1, "name": name} for i, name in enumerate(CLASSES)]
        (root / f"annotations/instances_{split}2017.json").write_text(json.dumps(document))
    return f"coco:{root}"


def write_yolo(root: Path, *, train: int = 16, val: int = 4, polygons: bool = False) -> str:
    """Write the same in YOLO's layout, with boxes or polygons."""
    for split, name, image, squares in draw_squares(train, val):
        save(image, root / f"images/{split}/{name}.png")
        lines = []
        for square in squares:
            left, top, right, bottom = np.array(square.box) / (WIDTH, HEIGHT, WIDTH, HEIGHT)
            numbers = [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
            if polygons:
                numbers = [left, top, right, top, right, bottom, left, bottom]
            lines.append(" ".join([str(square.label), *(f"{number:.9f}" for number in numbers)]))
        if lines:
            labels = root / f"labels/{split}/{name}.txt"
            labels.parent.mkdir(parents=True, exist_ok=True)
            labels.write_text("\n".join(lines) + "\n")
    names = "".join(f"  {i}: {name}\n" for i, name in enumerate(CLASSES))
    (root / "data.yaml").write_text(f"path: .\ntrain: images/train\nval: images/val\nnames:\n{names}")
    return f"yolo:{root}"


def write_voc(root: Path, *, train: int = 16, val: int = 4) -> str:
    """Write the same in Pascal VOC's layout."""
    lists: dict[str, list[str]] = {}
    for split, number, image, squares in draw_squares(train, val):
        name = f"{split}_{number}"
        lists.setdefault(split, []).append(name)
        save(image, root / f"JPEGImages/{name}.png")
        objects = "".join(voc_object(CLASSES[square.label], square.box) for square in squares)
        size = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth></size>"
        file = root / f"Annotations/{name}.xml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"<annotation><filename>{name}.png</filename>{size}{objects}</annotation>")
    (root / "ImageSets/Main").mkdir(parents=True)
    for split, names in lists.items():
        (root / f"ImageSets/Main/{split}.txt").write_text("\n".join(names) + "\n")
    return f"voc:{root}"


def voc_object(name: str, box: tuple[int, int, int, int], *, difficult: int = 0) -> str:
    """The element of an object with this box (left, top, right, bottom) from 0."""
    left, top, right, bottom = box
    corners = f"<xmin>{left + 1}</xmin><ymin>{top + 1}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax>"
    return f"<object><name>{name}</name><difficult>{difficult}</difficult><bndbox>{corners}</bndbox></object>"


def write_pennfudan(root: Path, *, images: int = 20) -> str:
    """Write the training images as in Penn-Fudan: one mask of object numbers per image, no splits."""
    for _, name, image, squares in draw_squares(images, 0):
        mask = np.zeros((HEIGHT, WIDTH), np.uint8)
        for number, square in enumerate(squares, 1):
            left, top, right, bottom = square.box
            mask[top:bottom, left:right] = number
        save(image, root / f"PNGImages/{name}.png")
        save(Image.fromarray(mask), root / f"PedMasks/{name}_mask.png")
    return f"pennfudan:{root}"


def save(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
