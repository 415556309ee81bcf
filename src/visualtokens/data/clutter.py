"""Backgrounds that are hard to look past: gradients, textures, shapes and strokes, none of them a digit."""

from __future__ import annotations

import colorsys
import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Colour = tuple[int, int, int]
Pixels = NDArray[np.floating]  # float32 (H, W, 3) or (H, W), from 0 to 1

_SUPERSAMPLE = 2  # shapes are drawn this much larger, then shrunk: PIL does not smooth their edges


def clutter(rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    """A random RGB background of ``size`` (H, W)."""
    hue = rng.uniform()
    ground = _ground(rng, size, hue)
    for _ in range(rng.integers(1, 3)):
        ground = _add_texture(rng, ground, hue)
    image = Image.fromarray((ground * 255).round().astype(np.uint8))
    return _draw_shapes(rng, image, hue)


def random_colour(rng: np.random.Generator, hue: float, *, spread: float = 0.5) -> Colour:
    """A colour whose hue is within ``spread`` of the one given (hues go round from 1 to 0)."""
    around = (hue + rng.uniform(-spread, spread)) % 1
    red, green, blue = colorsys.hsv_to_rgb(around, rng.uniform(0.15, 0.75), rng.uniform(0.2, 0.95))
    return round(red * 255), round(green * 255), round(blue * 255)


def smooth_noise(rng: np.random.Generator, size: tuple[int, int], cells: int) -> Pixels:
    """Noise (H, W) from 0 to 1 without detail finer than 1/``cells`` of the image."""
    height, width = size
    coarse = rng.random((cells + 1, cells + 1), dtype=np.float32)
    field = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    low, high = field.min(), field.max()
    return (field - low) / max(high - low, 1e-6)


def _ground(rng: np.random.Generator, size: tuple[int, int], hue: float) -> Pixels:
    """Two colours blended by a slope, and a third one in soft clouds."""
    first, second, third = (
        np.array(random_colour(rng, hue, spread=0.15), np.float32) / 255 for _ in range(3)
    )
    slope = _along(size, rng.uniform(0, 2 * math.pi))[..., None]  # (H, W, 1)
    clouds = smooth_noise(rng, size, int(rng.integers(2, 7)))[..., None] * np.float32(rng.uniform(0.2, 0.9))
    ground = first + (second - first) * slope
    return ground + (third - ground) * clouds


def _along(size: tuple[int, int], angle: float) -> Pixels:
    """How far each pixel (H, W) lies in a direction, from 0 at the first to 1 at the last."""
    x, y = _axes(size, angle)
    distance = x + y
    return (distance - distance.min()) / max(np.ptp(distance), 1)


def _axes(size: tuple[int, int], angle: float) -> tuple[Pixels, Pixels]:
    """What the column (1, W) and the row (H, 1) of a pixel add to its distance in a direction."""
    height, width = size
    x = np.arange(width, dtype=np.float32)[None] * np.float32(math.cos(angle))
    y = np.arange(height, dtype=np.float32)[:, None] * np.float32(math.sin(angle))
    return x, y


def _add_texture(rng: np.random.Generator, ground: Pixels, hue: float) -> Pixels:
    """A pattern in another colour, strong in some places and absent in others."""
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
    draw = ImageDraw.Draw(large, "RGBA")  # lets colours be see-through
    for _ in range(rng.integers(5, 11)):
        _draw_blob(rng, draw, large.size, hue)
    for _ in range(rng.integers(2, 6)):
        _draw_stroke(rng, draw, large.size, hue)
    return large.resize(image.size, Image.Resampling.BOX)


def _draw_blob(
    rng: np.random.Generator, draw: ImageDraw.ImageDraw, size: tuple[int, int], hue: float
) -> None:
    """A filled polygon, star or ellipse. Filled, because a ring could be read as a zero."""
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
    """A wave or zigzag from edge to edge. A shorter stroke could be read as a one or a seven."""
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
