"""Detections of one image: from torchvision's detectors, whose labels count from 1, and drawn on it."""

from __future__ import annotations

import math
from collections import Counter
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
    found |= {name: found[name].float() for name in ("boxes", "scores")}  # bfloat16 under autocast
    left, top = found["boxes"][:, 0], found["boxes"][:, 1]
    order = torch.from_numpy(np.lexsort((top, left, found["labels"], -found["scores"])))
    found = {name: value[order] for name, value in found.items()}
    return Detections(found["boxes"], found["labels"] - 1, found["scores"], found.get("masks"))


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
# Lightness, chroma (of OKLCH) and change of hue of the objects of one class, in turn. None of them is dark.
SHADES = ((0.70, 0.20, 0.0), (0.87, 0.10, 0.03), (0.55, 0.20, -0.03), (0.79, 0.17, -0.06), (0.64, 0.12, 0.06))
FIRST_HUE = 0.08  # red
# OKLab, by B. Ottosson: https://bottosson.github.io/posts/oklab/
_OKLAB_TO_CONES = np.array(
    [
        [1.0, 1.0, 1.0],
        [0.3963377774, -0.1055613458, -0.0894841775],
        [0.2158037573, -0.0638541728, -1.2914855480],
    ]
)
_CONES_TO_RGB = np.array(
    [
        [4.0767416621, -1.2684380046, -0.0041960863],
        [-3.3077115913, 2.6097574011, -0.7034186147],
        [0.2309699292, -0.3413193965, 1.7076147010],
    ]
)
TINT = 0.45  # opacity of a mask
RGB = tuple[int, int, int]
Rectangle = tuple[float, float, float, float]


def draw(
    image: Image.Image,
    detections: Detections,
    classes: Sequence[str],
    *,
    scores: bool = True,
    min_side: int = MIN_DRAWN_SIDE,
) -> Image.Image:
    """Return a copy of the image with the mask, box, class and score of every detection.

    Every class has its hue, and the objects of a class differ in shade. An image with a side of less than
    ``min_side`` is enlarged by an integer factor. ``scores=False`` omits the scores, as of annotations.
    """
    factor = max(1, math.ceil(min_side / min(image.size)))
    size = (image.width * factor, image.height * factor)
    picture = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    colours = object_colours(detections.labels.tolist())
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
        text = printable(classes[label]) + (f" {score:.2f}" if scores else "")
        _write(pen, text, boxes[i], colours[i], font, size, taken)
    return picture


def truth(boxes: torch.Tensor, labels: torch.Tensor, masks: torch.Tensor | None) -> Detections:
    """Return annotated objects as detections of score 1, to draw them."""
    return Detections(boxes, labels, torch.ones(len(labels)), masks)


def object_colours(labels: Sequence[int]) -> list[RGB]:
    """Return the colour of each object: the hue of its class, in another shade than the object before."""
    drawn: Counter[int] = Counter()
    colours: list[RGB] = []
    for label in labels:
        lightness, chroma, turn = SHADES[drawn[label] % len(SHADES)]
        drawn[label] += 1
        colours.append(_from_oklch(lightness, chroma, label * HUE_STEP + FIRST_HUE + turn))
    return colours


def _from_oklch(lightness: float, chroma: float, hue: float) -> RGB:
    """Return a colour of OKLCH, in which equal steps look equal; its chroma is reduced to fit into sRGB.

    ``hue`` is a fraction of the circle.
    """
    while True:
        a, b = chroma * math.cos(2 * math.pi * hue), chroma * math.sin(2 * math.pi * hue)
        cones = (np.array([1, a, b]) * (lightness, 1, 1)) @ _OKLAB_TO_CONES
        linear = cones**3 @ _CONES_TO_RGB
        if linear.min() >= -1e-3 and linear.max() <= 1 + 1e-3:
            break
        chroma *= 0.95
    linear = linear.clip(0, 1)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    red, green, blue = (255 * encoded).round().astype(int).tolist()
    return red, green, blue


def text_colour(background: RGB) -> str:
    """Return black or white, whichever has the higher contrast (of WCAG 2) to the background."""
    linear = [
        (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4) for x in (c / 255 for c in background)
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "white"


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
    pen.text((place[0] + pad - left, place[1] + pad - top), text, fill=text_colour(colour), font=font)


def _place(corner: tuple[float, float], label: tuple[float, float], size: tuple[int, int]) -> Rectangle:
    """Return the rectangle of a label with this top left corner, moved into the picture."""
    x = max(0, min(corner[0], size[0] - label[0]))
    y = max(0, min(corner[1], size[1] - label[1]))
    return x, y, x + label[0], y + label[1]


def _overlap(a: Rectangle, b: Rectangle) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
