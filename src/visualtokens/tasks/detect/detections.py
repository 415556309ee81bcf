"""Detections of one image: from torchvision's detectors, whose labels count from 1, and drawn on it."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor, nn
from torchvision.transforms.v2 import functional

from visualtokens.data.detection import Objects, to_floats
from visualtokens.errors import UserError
from visualtokens.files import write_atomically
from visualtokens.tables import printable
from visualtokens.tasks.detect.detectors import Detection
from visualtokens.tasks.task import Prediction

SCORE = 0.5  # default threshold of a prediction


@dataclass(frozen=True, eq=False)
class Detections:
    """The n objects that a detector finds on an image, highest score first."""

    boxes: Tensor  # (n, 4) float32: left, top, right, bottom in pixels
    labels: Tensor  # (n,) int64: class indices from 0
    scores: Tensor  # (n,) float32: 0 to 1
    masks: Tensor | None  # (n, H, W) bool; None for a detector without masks

    def __len__(self) -> int:
        return len(self.labels)

    def above(self, score: float) -> Detections:
        """Return the detections with at least this score."""
        keep = self.scores >= score
        masks = None if self.masks is None else self.masks[keep]
        return Detections(self.boxes[keep], self.labels[keep], self.scores[keep], masks)

    def to_dicts(self, classes: Sequence[str]) -> list[dict[str, Any]]:
        """Return class, score, box and mask area of every detection as JSON values."""
        dicts: list[dict[str, Any]] = []
        for i, (box, label, score) in enumerate(
            zip(self.boxes.tolist(), self.labels.tolist(), self.scores.tolist(), strict=True)
        ):
            area = {} if self.masks is None else {"mask_pixels": int(self.masks[i].sum())}
            dicts.append({"class": classes[label], "score": score, "box": [round(x, 1) for x in box]} | area)
        return dicts


def from_detector(found: Detection) -> Detections:
    """Return the output of a detector for one image, on the CPU and sorted by score.

    Detections of equal score are sorted by label, left and top edge: their order must not depend on the
    kernels that a processor uses.
    """
    found = {name: value.cpu() for name, value in found.items()}
    left, top = found["boxes"][:, 0], found["boxes"][:, 1]
    order = torch.from_numpy(np.lexsort((top, left, found["labels"], -found["scores"])))
    found = {name: value[order] for name, value in found.items()}
    return Detections(
        found["boxes"].float(), found["labels"] - 1, found["scores"].float(), found.get("masks")
    )


def to_target(objects: Objects) -> Detection:
    """Return the objects of one image as the training target of a detector."""
    target = {"boxes": objects.boxes, "labels": objects.labels + 1}
    if objects.masks is not None:
        target["masks"] = objects.masks.to(torch.uint8)
    return target


def predict(model: nn.Module, image: Image.Image, *, score: float = SCORE) -> Detections:
    """Return the objects on an RGB image with at least this score, on the device of the model."""
    if not 0 <= score <= 1:
        raise UserError(f"score={score} is not between 0 and 1")
    if model.training:
        raise UserError("the detector is in training mode; call model.eval() first")
    pixels = functional.pil_to_tensor(image.convert("RGB")).to(next(model.parameters()).device)
    with torch.inference_mode():
        return from_detector(model([to_floats(pixels)])[0]).above(score)


@dataclass(frozen=True, eq=False)
class ImageDetections(Prediction):
    """The detections on one image, with the names of the classes."""

    detections: Detections
    classes: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        return {"objects": self.detections.to_dicts(self.classes)}

    def text(self) -> str:
        objects = self.detections.to_dicts(list(map(printable, self.classes)))
        lines = [f"  {o['score']:6.1%}  {o['class']}  at {', '.join(map(str, o['box']))}" for o in objects]
        return "\n".join(lines or ["  no object above the score threshold"])

    def rows(self) -> list[list[str | float | int | None]]:
        objects = self.detections.to_dicts(self.classes)
        masks = ["mask_pixels"] if self.detections.masks is not None else []
        return [[o["class"], o["score"], *o["box"], *(o[name] for name in masks)] for o in objects]

    def draw(self, image: Image.Image) -> Image.Image:
        """Return the image with the mask, box, class and score of every detection."""
        return draw(image, self.detections, self.classes)

    def save(self, image: Image.Image, folder: Path, name: str) -> dict[str, Path]:
        folder.mkdir(parents=True, exist_ok=True)
        picture = folder / f"{name}_objects.png"
        drawn = self.draw(image)
        write_atomically(picture, lambda temporary: drawn.save(temporary, format="PNG"))
        return {"picture": picture}


# Drawing.

MIN_DRAWN_SIDE = 480  # smaller images are enlarged so that labels can be read
HUE_STEP = (math.sqrt(5) - 1) / 2  # golden ratio: hues of neighbouring classes are far apart
TINT = 0.45  # opacity of a mask
RGB = tuple[int, int, int]
Rectangle = tuple[float, float, float, float]


def draw(image: Image.Image, detections: Detections, classes: Sequence[str]) -> Image.Image:
    """Return a copy of the image with the mask, box, class and score of every detection.

    Every class has its colour. A small image is enlarged by an integer factor.
    """
    factor = max(1, math.ceil(MIN_DRAWN_SIDE / min(image.size)))
    size = (image.width * factor, image.height * factor)
    picture = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    colours = [_colour(label) for label in detections.labels.tolist()]
    order = range(len(detections) - 1, -1, -1)  # the highest score on top
    if detections.masks is not None:
        for i in order:
            _tint(picture, detections.masks[i].numpy(), colours[i])
    pen = ImageDraw.Draw(picture)
    boxes = (detections.boxes * factor).tolist()
    width = max(2, round(min(size) / 300))
    for i in order:
        pen.rectangle(_inside(boxes[i], size), outline=colours[i], width=width)
    font = ImageFont.load_default(max(13, round(min(size) / 40)))
    taken: list[Rectangle] = []
    for i, (label, score) in enumerate(
        zip(detections.labels.tolist(), detections.scores.tolist(), strict=True)
    ):
        _write(pen, f"{printable(classes[label])} {score:.2f}", boxes[i], colours[i], font, size, taken)
    return picture


def truth(boxes: torch.Tensor, labels: torch.Tensor, masks: torch.Tensor | None) -> Detections:
    """Return annotated objects as detections of score 1, to draw them."""
    return Detections(boxes, labels, torch.ones(len(labels)), masks)


def _colour(label: int) -> RGB:
    red, green, blue = colorsys.hsv_to_rgb(label * HUE_STEP % 1, 0.75, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)


def _tint(picture: Image.Image, mask: np.ndarray, colour: RGB) -> None:
    """Tint the pixels of a mask; its outline is opaque."""
    shape = Image.fromarray(mask.astype(np.uint8) * 255).resize(picture.size, Image.Resampling.BILINEAR)
    shape = shape.point(lambda value: 255 if value >= 128 else 0)
    outline = np.asarray(shape.filter(ImageFilter.MaxFilter(3))) != np.asarray(
        shape.filter(ImageFilter.MinFilter(3))
    )
    strength = np.asarray(shape, np.float32) * TINT
    strength[outline] = 255
    picture.paste(colour, mask=Image.fromarray(strength.astype(np.uint8)))


def _inside(box: Sequence[float], size: tuple[int, int]) -> Rectangle:
    """Return the box clipped to the picture, at least one pixel large."""
    left, right = (min(max(x, 0), size[0] - 1) for x in (box[0], box[2]))
    top, bottom = (min(max(y, 0), size[1] - 1) for y in (box[1], box[3]))
    return left, top, max(left, right), max(top, bottom)


def _write(
    pen: ImageDraw.ImageDraw,
    text: str,
    box: Sequence[float],
    colour: RGB,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    size: tuple[int, int],
    taken: list[Rectangle],
) -> None:
    """Write a label at a corner of the box, if possible where it overlaps no other label."""
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    pad = 3
    width, height = right - left + 2 * pad, bottom - top + 2 * pad
    corners = [
        (box[0], box[1] - height),
        (box[0], box[1]),
        (box[0], box[3]),
        (box[2] - width, box[3] - height),
        (box[2] - width, box[1]),
    ]
    places = [_place(corner, (width, height), size) for corner in corners]
    free = (place for place in places if not any(_overlap(place, other) for other in taken))
    place = next(free, places[0])
    taken.append(place)
    pen.rectangle(place, fill=colour)
    bright = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 128
    pen.text(
        (place[0] + pad - left, place[1] + pad - top), text, fill="black" if bright else "white", font=font
    )


def _place(corner: tuple[float, float], label: tuple[float, float], size: tuple[int, int]) -> Rectangle:
    """Return the rectangle of a label with this top left corner, moved into the picture."""
    x = max(0, min(corner[0], size[0] - label[0]))
    y = max(0, min(corner[1], size[1] - label[1]))
    return x, y, x + label[0], y + label[1]


def _overlap(a: Rectangle, b: Rectangle) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
