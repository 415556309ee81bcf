"""Scenes of real digits on cluttered canvases, with everything that detection and segmentation need."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch import Tensor

from visualtokens.data.base import ImageDataset, Split, check_split
from visualtokens.data.clutter import Pixels, clutter
from visualtokens.data.digits import Digits
from visualtokens.data.randomness import check_seed, generator
from visualtokens.errors import UserError

LENGTHS = {"train": 4000, "val": 500}
MIN_SIDE = 32
MOST_DIGITS = 6
LEAST_VISIBLE = 0.7  # of each digit, however many others lie on it

_HEIGHTS = (0.22, 0.5)  # of a digit, as a share of the canvas's short side
_ATTEMPTS = 12  # at finding a place for one digit
_STREAM = {"train": 0, "val": 1}
_LUMA = np.array((0.299, 0.587, 0.114), np.float32)


@dataclass(frozen=True, eq=False)
class Scene:
    """One image and all n digits on it, in the order they were laid down."""

    image: Image.Image  # RGB
    labels: Tensor  # (n,) the digit
    boxes: Tensor  # (n, 4) float32: left, top, right, bottom in pixels; right - left is the width
    masks: Tensor  # (n, H, W) bool: the visible pixels
    semantic: Tensor  # (H, W) int64: 0 is background, 1 + digit elsewhere
    rows: Tensor  # (n,) which row of scikit-learn's digits each one is


class DigitScenes(ImageDataset):
    """Scenes of ``size`` (H, W), made on the fly; scene i depends on ``seed``, split, size and i only.

    Digits of the train split appear in train scenes only, those of the val split in val scenes only.
    As a dataset of labelled images, the label is that of the largest visible digit.
    """

    def __init__(
        self,
        split: Split,
        *,
        size: tuple[int, int] = (128, 128),
        length: int | None = None,
        seed: int = 0,
    ) -> None:
        check_split(split)
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
        """Scene number ``index``, always the same one."""
        if not 0 <= index < self.length:
            raise IndexError(f"scene {index} of {self.length}")
        rng = generator(self.seed, _STREAM[self.split], index)
        canvas = _Canvas(clutter(rng, self.size))
        labels, rows = [], []
        for _ in range(rng.integers(1, MOST_DIGITS + 1)):
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
    """The pixels so far, and which of them each digit still shows."""

    def __init__(self, background: Image.Image) -> None:
        self.pixels: Pixels = np.asarray(background).astype(np.float32) / 255  # (H, W, 3)
        self.masks: list[NDArray[np.bool_]] = []  # (H, W) each
        self._whole: list[int] = []  # how many pixels each digit had before others came

    def add(self, digit: NDArray[np.uint8], rng: np.random.Generator) -> bool:
        """Lay an 8×8 digit on top, unless no place is found that leaves the others visible."""
        cover = _glyph(digit, rng, min(self.pixels.shape[:2]))  # (h, w)
        (height, width), (h, w) = self.pixels.shape[:2], cover.shape
        for _ in range(_ATTEMPTS):
            top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
            mask = np.zeros((height, width), np.bool_)
            mask[top : top + h, left : left + w] = cover >= 0.5
            if self._leaves_others(mask):
                self._paint(cover, top, left, rng)
                self.masks = [other & ~mask for other in self.masks] + [mask]
                self._whole.append(int(mask.sum()))
                return True
        return False

    def image(self, rng: np.random.Generator) -> Image.Image:
        """The canvas under one film of camera noise, so that neither digits nor shapes are flat."""
        noise = rng.standard_normal(self.pixels.shape, np.float32) * np.float32(rng.uniform(0.005, 0.03))
        return Image.fromarray((np.clip(self.pixels + noise, 0, 1) * 255).round().astype(np.uint8))

    def _leaves_others(self, mask: NDArray[np.bool_]) -> bool:
        return all(
            (other & ~mask).sum() >= LEAST_VISIBLE * whole
            for other, whole in zip(self.masks, self._whole, strict=True)
        )

    def _paint(self, cover: Pixels, top: int, left: int, rng: np.random.Generator) -> None:
        h, w = cover.shape
        self._cast_shadow(cover, top, left, rng)
        under = self.pixels[top : top + h, left : left + w]  # (h, w, 3), a view
        ink = _ink(under[cover >= 0.5], rng)
        shade = 1 + np.linspace(0.12, -0.12, h, dtype=np.float32)[:, None, None]  # lit from above
        under += (np.clip(ink * shade, 0, 1) - under) * cover[..., None]

    def _cast_shadow(self, cover: Pixels, top: int, left: int, rng: np.random.Generator) -> None:
        height, width = self.pixels.shape[:2]
        reach = max(1, cover.shape[0] // 16)
        shadow = Image.new("L", (width, height))
        shadow.paste(Image.fromarray((cover * 255).astype(np.uint8)), (left + reach, top + reach))
        dark = np.asarray(shadow.filter(ImageFilter.BoxBlur(reach)), np.float32) / 255
        self.pixels *= 1 - dark[..., None] * np.float32(rng.uniform(0, 0.6))


def _glyph(digit: NDArray[np.uint8], rng: np.random.Generator, short_side: int) -> Pixels:
    """An 8×8 digit as smooth cover (h, w) from 0 to 1: enlarged, turned a little, cut to its ink."""
    height = max(14, round(rng.uniform(*_HEIGHTS) * short_side))
    width = round(height * rng.uniform(0.8, 1.05))
    ink = Image.fromarray(np.pad(digit, 1)).resize((width, height), Image.Resampling.BICUBIC)
    ink = ink.rotate(rng.uniform(-15, 15), Image.Resampling.BICUBIC, expand=True)
    strength = np.asarray(ink).astype(np.float32) / 255
    # The source is blurred by its 8×8 grid: a steep curve around the middle gives it an edge again,
    # about as wide as one pixel of the canvas.
    steep = max(2.0, height / 10)
    cover = np.clip((strength - 0.4 * strength.max()) * steep + 0.5, 0, 1)
    left, top, right, bottom = _tight_box(cover >= 0.5).astype(int)
    return cover[top:bottom, left:right]


def _ink(under: Pixels, rng: np.random.Generator) -> Pixels:
    """A vivid colour (3,) that differs in brightness from most of the pixels (n, 3) it will cover."""
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
    """(left, top, right, bottom) of the true pixels, right and bottom being one past the last."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return np.array((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1), np.float32)
