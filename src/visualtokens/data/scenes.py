"""Synthetic scenes: handwritten digits on cluttered backgrounds, annotated with boxes and masks."""

from __future__ import annotations

import colorsys
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter
from torch import Tensor

from visualtokens.data.arrays import Digits
from visualtokens.data.base import ImageDataset, Split, check_seed, check_split, generator
from visualtokens.errors import UserError

LENGTHS = {"train": 4000, "val": 500}
MIN_SIDE = 32
MAX_DIGITS = 6
MIN_VISIBLE = 0.7  # fraction of each digit that later digits leave uncovered

Colour = tuple[int, int, int]
Pixels = NDArray[np.floating]  # float32 (H, W, 3) or (H, W), from 0 to 1

_HEIGHTS = (0.22, 0.5)  # of a digit, as a fraction of the canvas's short side
_ATTEMPTS = 12  # at placing one digit
_STREAM = {"train": 0, "val": 1}
_LUMA = np.array((0.299, 0.587, 0.114), np.float32)
_SUPERSAMPLE = 2  # shapes are drawn at this scale and downsampled, because PIL does not antialias them


@dataclass(frozen=True, eq=False)
class Scene:
    """One image and its n digits, from bottom to top."""

    image: Image.Image  # RGB
    labels: Tensor  # (n,) int64: the digit
    boxes: Tensor  # (n, 4) float32: left, top, right, bottom in pixels; right - left is the width
    masks: Tensor  # (n, H, W) bool: visible pixels
    semantic: Tensor  # (H, W) int64: 0 is background, 1 + d the digit d
    rows: Tensor  # (n,) int64: row of scikit-learn's digits


class DigitScenes(ImageDataset):
    """Scenes of ``size`` (H, W), generated on access; scene i depends on ``seed``, split, size and i only.

    Training and validation scenes show digits of their own split only. As a classification dataset, the label
    is the digit with the largest visible area.
    """

    def __init__(
        self,
        split: Split,
        *,
        size: tuple[int, int] = (128, 128),
        length: int | None = None,
        seed: int = 0,
    ) -> None:
        check_split(split, source="digit_scenes", has=tuple(LENGTHS))
        check_seed(seed)
        if min(size) < MIN_SIDE:
            raise UserError(f"size={size[0]}x{size[1]} leaves no room for digits; give at least {MIN_SIDE}")
        if length is not None and length < 1:
            raise UserError(f"length={length} leaves no scenes; give at least 1")
        self.spec = f"digit_scenes:{size[0]}x{size[1]}"
        self.split = split
        self.size = size
        self.length = LENGTHS[split] if length is None else length
        self.seed = seed
        self._digits = Digits(split)
        self.classes = self._digits.classes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        scene = self.scene(index)
        return scene.image, int(scene.labels[scene.masks.sum((1, 2)).argmax()])

    def path(self, index: int) -> str:
        return f"digit_scenes/{self.split}[{index}]"

    def scene(self, index: int) -> Scene:
        """Scene number ``index`` with all annotations."""
        if not 0 <= index < self.length:
            raise IndexError(f"scene {index} of {self.length}")
        rng = generator(self.seed, _STREAM[self.split], index)
        canvas = _Canvas(clutter(rng, self.size))
        labels, rows = [], []
        for _ in range(rng.integers(1, MAX_DIGITS + 1)):
            pick = int(rng.integers(len(self._digits)))
            if canvas.add(self._digits.images[pick], rng):
                labels.append(int(self._digits.labels[pick]))
                rows.append(int(self._digits.rows[pick]))
        masks = np.stack(canvas.masks)  # (n, H, W)
        semantic = np.zeros(self.size, np.int64)
        for mask, label in zip(masks, labels, strict=True):
            semantic[mask] = 1 + label
        return Scene(
            canvas.image(rng),
            torch.tensor(labels),
            torch.from_numpy(np.stack([_tight_box(mask) for mask in masks])),
            torch.from_numpy(masks),
            torch.from_numpy(semantic),
            torch.tensor(rows),
        )


class _Canvas:
    """The pixels painted so far, and the visible mask of each digit."""

    def __init__(self, background: Image.Image) -> None:
        self.pixels: Pixels = np.asarray(background).astype(np.float32) / 255  # (H, W, 3)
        self.masks: list[NDArray[np.bool_]] = []  # (H, W) each
        self._areas: list[int] = []  # pixels of each digit before occlusion

    def add(self, digit: NDArray[np.uint8], rng: np.random.Generator) -> bool:
        """Paint an 8×8 digit on top; False if no sampled position leaves the others visible."""
        opacity = _glyph(digit, rng, min(self.pixels.shape[:2]))  # (h, w)
        (height, width), (h, w) = self.pixels.shape[:2], opacity.shape
        for _ in range(_ATTEMPTS):
            top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
            mask = np.zeros((height, width), np.bool_)
            mask[top : top + h, left : left + w] = opacity >= 0.5
            if self._leaves_others_visible(mask):
                self._paint(opacity, top, left, rng)
                self.masks = [other & ~mask for other in self.masks] + [mask]
                self._areas.append(int(mask.sum()))
                return True
        return False

    def image(self, rng: np.random.Generator) -> Image.Image:
        """The canvas with camera noise, so that neither digits nor shapes are flat."""
        noise = rng.standard_normal(self.pixels.shape, np.float32) * np.float32(rng.uniform(0.005, 0.03))
        return Image.fromarray((np.clip(self.pixels + noise, 0, 1) * 255).round().astype(np.uint8))

    def _leaves_others_visible(self, mask: NDArray[np.bool_]) -> bool:
        return all(
            (other & ~mask).sum() >= MIN_VISIBLE * area
            for other, area in zip(self.masks, self._areas, strict=True)
        )

    def _paint(self, opacity: Pixels, top: int, left: int, rng: np.random.Generator) -> None:
        h, w = opacity.shape
        self._cast_shadow(opacity, top, left, rng)
        under = self.pixels[top : top + h, left : left + w]  # (h, w, 3), a view
        ink = _ink(under[opacity >= 0.5], rng)
        shade = 1 + np.linspace(0.12, -0.12, h, dtype=np.float32)[:, None, None]  # lit from above
        under += (np.clip(ink * shade, 0, 1) - under) * opacity[..., None]

    def _cast_shadow(self, opacity: Pixels, top: int, left: int, rng: np.random.Generator) -> None:
        height, width = self.pixels.shape[:2]
        reach = max(1, opacity.shape[0] // 16)
        shadow = Image.new("L", (width, height))
        shadow.paste(Image.fromarray((opacity * 255).astype(np.uint8)), (left + reach, top + reach))
        dark = np.asarray(shadow.filter(ImageFilter.BoxBlur(reach)), np.float32) / 255
        self.pixels *= 1 - dark[..., None] * np.float32(rng.uniform(0, 0.6))


def _glyph(digit: NDArray[np.uint8], rng: np.random.Generator, short_side: int) -> Pixels:
    """The opacity ``(h, w)`` of an 8×8 digit, from 0 to 1: enlarged, slightly rotated, cropped to its ink."""
    height = max(14, round(rng.uniform(*_HEIGHTS) * short_side))
    width = round(height * rng.uniform(0.8, 1.05))
    ink = Image.fromarray(np.pad(digit, 1)).resize((width, height), Image.Resampling.BICUBIC)
    ink = ink.rotate(rng.uniform(-15, 15), Image.Resampling.BICUBIC, expand=True)
    strength = np.asarray(ink).astype(np.float32) / 255
    # Enlarging blurs the 8×8 grid; a steep curve around the middle restores edges about one pixel wide.
    steep = max(2.0, height / 10)
    opacity = np.clip((strength - 0.4 * strength.max()) * steep + 0.5, 0, 1)
    left, top, right, bottom = _tight_box(opacity >= 0.5).astype(int)
    return opacity[top:bottom, left:right]


def _ink(under: Pixels, rng: np.random.Generator) -> Pixels:
    """A vivid colour ``(3,)`` that differs in brightness from most of the pixels ``under (n, 3)``."""
    brightness = (under * _LUMA).sum(1)  # (n,)
    best, best_share = np.zeros(3, np.float32), -1.0
    for _ in range(12):
        hue, saturation, value = rng.uniform(), rng.uniform(0.3, 1), rng.uniform(0.1, 1)
        colour = np.array(colorsys.hsv_to_rgb(hue, saturation, value), np.float32)
        share = float((np.abs(brightness - (colour * _LUMA).sum()) > 0.25).mean())
        if share > 0.9:
            return colour
        if share > best_share:
            best, best_share = colour, share
    return best


def _tight_box(mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    """(left, top, right, bottom) of the true pixels; right and bottom are exclusive."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return np.array((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1), np.float32)


def clutter(rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    """A random RGB background of ``size`` (H, W): gradients, textures, shapes and strokes, no digits."""
    hue = rng.uniform()
    ground = _ground(rng, size, hue)
    for _ in range(rng.integers(1, 3)):
        ground = _add_texture(rng, ground, hue)
    image = Image.fromarray((ground * 255).round().astype(np.uint8))
    return _draw_shapes(rng, image, hue)


def random_colour(rng: np.random.Generator, hue: float, *, spread: float = 0.5) -> Colour:
    """A colour whose hue is within ``spread`` of the one given (hues wrap around at 1)."""
    around = (hue + rng.uniform(-spread, spread)) % 1
    red, green, blue = colorsys.hsv_to_rgb(around, rng.uniform(0.15, 0.75), rng.uniform(0.2, 0.95))
    return round(red * 255), round(green * 255), round(blue * 255)


def smooth_noise(rng: np.random.Generator, size: tuple[int, int], cells: int) -> Pixels:
    """Noise ``(H, W)`` from 0 to 1 without detail finer than 1/``cells`` of the image."""
    height, width = size
    coarse = rng.random((cells + 1, cells + 1), dtype=np.float32)
    field = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    low, high = field.min(), field.max()
    return (field - low) / max(high - low, 1e-6)


def _ground(rng: np.random.Generator, size: tuple[int, int], hue: float) -> Pixels:
    """A gradient between two colours, with soft clouds of a third."""
    first, second, third = (
        np.array(random_colour(rng, hue, spread=0.15), np.float32) / 255 for _ in range(3)
    )
    slope = _along(size, rng.uniform(0, 2 * math.pi))[..., None]  # (H, W, 1)
    clouds = smooth_noise(rng, size, int(rng.integers(2, 7)))[..., None] * np.float32(rng.uniform(0.2, 0.9))
    ground = first + (second - first) * slope
    return ground + (third - ground) * clouds


def _along(size: tuple[int, int], angle: float) -> Pixels:
    """The position of each pixel ``(H, W)`` along a direction, from 0 to 1."""
    x, y = _axes(size, angle)
    distance = x + y
    return (distance - distance.min()) / max(np.ptp(distance), 1)


def _axes(size: tuple[int, int], angle: float) -> tuple[Pixels, Pixels]:
    """The terms of column ``(1, W)`` and row ``(H, 1)`` in the distance of a pixel along a direction."""
    height, width = size
    x = np.arange(width, dtype=np.float32)[None] * np.float32(math.cos(angle))
    y = np.arange(height, dtype=np.float32)[:, None] * np.float32(math.sin(angle))
    return x, y


def _add_texture(rng: np.random.Generator, ground: Pixels, hue: float) -> Pixels:
    """The ground with a pattern in another colour, of varying strength."""
    size = ground.shape[:2]
    where = np.clip(2.5 * smooth_noise(rng, size, 3) - 0.75, 0, 1)
    weight = (_pattern(rng, size) * where * np.float32(rng.uniform(0.2, 0.6)))[..., None]  # (H, W, 1)
    colour = np.array(random_colour(rng, hue), np.float32) / 255
    return np.clip(ground + (colour - ground) * weight, 0, 1)


def _pattern(rng: np.random.Generator, size: tuple[int, int]) -> Pixels:
    kind = rng.choice(["stripes", "checks", "dots", "weave", "grain"])
    if kind == "grain":
        return 0.5 + 0.3 * rng.standard_normal(size, dtype=np.float32)
    angle, period = rng.uniform(0, math.pi), rng.uniform(0.03, 0.12) * min(size) + 2
    u = _wave(size, angle, period)
    v = _wave(size, angle + math.pi / 2, period)
    if kind == "stripes":
        wave = u
    elif kind == "checks":
        wave = np.sign(u) * np.sign(v)
    elif kind == "dots":
        wave = np.clip(4 * (u + v) - 3, -1, 1)
    else:
        wave = np.maximum(u, v)
    return (wave + 1) / 2


def _wave(size: tuple[int, int], angle: float, period: float) -> Pixels:
    x, y = _axes(size, angle)
    return np.sin((x + y) * np.float32(2 * math.pi / period))


def _draw_shapes(rng: np.random.Generator, image: Image.Image, hue: float) -> Image.Image:
    width, height = image.size
    large = image.resize((width * _SUPERSAMPLE, height * _SUPERSAMPLE), Image.Resampling.BILINEAR)
    draw = ImageDraw.Draw(large, "RGBA")  # for translucent colours
    for _ in range(rng.integers(5, 11)):
        _draw_blob(rng, draw, large.size, hue)
    for _ in range(rng.integers(2, 6)):
        _draw_stroke(rng, draw, large.size, hue)
    return large.resize(image.size, Image.Resampling.BOX)


def _draw_blob(
    rng: np.random.Generator, draw: ImageDraw.ImageDraw, size: tuple[int, int], hue: float
) -> None:
    """Draw a polygon, star or ellipse; filled, because a ring resembles a zero."""
    colour = (*random_colour(rng, hue), int(rng.integers(110, 256)))
    radius = rng.uniform(0.04, 0.16) * min(size)
    x, y = rng.uniform(0, size[0]), rng.uniform(0, size[1])
    kind = rng.choice(["polygon", "star", "ellipse"])
    if kind == "ellipse":
        a, b = radius, radius * rng.uniform(0.5, 1)
        draw.ellipse((x - a, y - b, x + a, y + b), fill=colour)
        return
    corners = int(rng.integers(3, 7)) if kind == "polygon" else 2 * int(rng.integers(4, 7))
    turn = rng.uniform(0, 2 * math.pi) + np.arange(corners) * (2 * math.pi / corners)
    reach = np.full(corners, radius)
    if kind == "star":
        reach[1::2] *= 0.45
    draw.polygon(list(zip(x + reach * np.cos(turn), y + reach * np.sin(turn), strict=True)), fill=colour)


def _draw_stroke(
    rng: np.random.Generator, draw: ImageDraw.ImageDraw, size: tuple[int, int], hue: float
) -> None:
    """Draw a wave or zigzag from edge to edge; a shorter stroke resembles a one or a seven."""
    colour = (*random_colour(rng, hue), int(rng.integers(140, 256)))
    long, across = max(size), min(size)
    step = np.linspace(-0.1, 1.1, 60)
    phase = step * rng.uniform(3, 9) * math.pi + rng.uniform(0, 2 * math.pi)
    wave = np.sin(phase) if rng.random() < 0.6 else np.arcsin(np.sin(phase))
    offset = wave * rng.uniform(0.02, 0.08) * across + (step - 0.5) * rng.uniform(-0.8, 0.8) * across
    x, y = step * long, rng.uniform(0, 1) * across + offset
    if (size[0] < size[1]) or (size[0] == size[1] and rng.random() < 0.5):
        x, y = y, x
    thickness = max(1, round(rng.uniform(0.006, 0.022) * across))
    draw.line(list(zip(x, y, strict=True)), fill=colour, width=thickness, joint="curve")
