"""From an image to what a model is given."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import (
    augment_and_mix_transform,
    auto_augment_transform,
    rand_augment_transform,
)
from timm.data.mixup import Mixup, mixup_target
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from visualtokens.data.base import seeded_globals
from visualtokens.data.decode import as_rgb
from visualtokens.errors import UserError, unknown

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the original


@dataclass(frozen=True)
class Preprocess:
    """Evaluation: resize the short side so that the crop fits, crop the centre, normalise.

    ``crop`` is the share of the largest fitting centre that is kept, as in timm's ``crop_pct``.
    """

    size: tuple[int, int]  # (H, W)
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    crop: float = 1.0

    def __post_init__(self) -> None:
        if len(self.size) != 2 or min(self.size) < 1:
            raise UserError(f"size={self.size} is not a height and a width of at least 1")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise UserError(f"mean={self.mean}, std={self.std}: give three numbers each, std above 0")
        if not 0 < self.crop <= 1:
            raise UserError(f"crop={self.crop} is not a share of the image; give more than 0 and at most 1")

    def __call__(self, image: Image.Image) -> Tensor:
        """``(3, H, W)`` float32."""
        image = as_rgb(image)
        return self.normalise(pixels(self.resize(image, self.crop_box(*image.size))))

    def crop_box(self, width: int, height: int) -> Box:
        """The part (left, top, right, bottom) of a ``width`` × ``height`` original that the model sees."""
        rows, columns = self.size
        scale = min(width / columns, height / rows) * self.crop
        across, down = (width - columns * scale) / 2, (height - rows * scale) / 2
        # Rounding must not carry the box a hair beyond the image.
        left, top = max(across, 0.0), max(down, 0.0)
        return left, top, width - left, height - top

    def resize(self, image: Image.Image, box: Box) -> Image.Image:
        """The box of the image at the model's size; one smoothed resampling does crop and resize."""
        rows, columns = self.size
        return image.resize((columns, rows), Image.Resampling.BICUBIC, box=box)

    def normalise(self, values: Tensor) -> Tensor:
        """``(…, H, W, 3)`` uint8 to ``(…, 3, H, W)`` float32."""
        mean = torch.tensor(self.mean).view(3, 1, 1)
        std = torch.tensor(self.std).view(3, 1, 1)
        # Channels go first while a value is still one byte.
        return values.movedim(-1, -3).contiguous().float().div_(255).sub_(mean).div_(std)


def pixels(image: Image.Image) -> Tensor:
    """The pixels ``(H, W, 3)`` of an RGB image as uint8."""
    return torch.from_numpy(np.array(image))


# Random changes to training images, drawn from the generator of each item.

Range = tuple[float, float]
Picture = TypeVar("Picture", Image.Image, tv_tensors.Image)


@dataclass(frozen=True)
class Augment:
    """How far a training image may differ from the original; the defaults change nothing.

    Flips are off unless asked for: a digit or a letter in the mirror is another sign.
    """

    crop_area: Range | None = None  # share of the image a random crop covers; None: crop as in evaluation
    crop_stretch: Range = (3 / 4, 4 / 3)  # width to height of that crop, relative to the model's size
    flip: float = 0.0  # probability of a left-right flip
    rotate: float = 0.0  # degrees, to either side
    translate: float = 0.0  # share of each side, to either side
    scale: Range = (1.0, 1.0)
    brightness: float = 0.0  # 0.2: between 0.8 and 1.2 times; likewise contrast and saturation
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # share of the colour circle, to either side, at most 0.5
    shift: int = 0  # whole pixels of the model's size, to either side; what it uncovers is black
    policy: str | None = None  # of timm: rand-m9-mstd0.5-inc1, original (AutoAugment), augmix-m3
    erase: float = 0.0  # probability that a rectangle is replaced by noise

    def __post_init__(self) -> None:
        if self.crop_area is not None and not 0 < self.crop_area[0] <= self.crop_area[1] <= 1:
            raise UserError(f"crop_area={self.crop_area} is not a range of shares between 0 and 1")
        for name in ("crop_stretch", "scale"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise UserError(f"{name}={(low, high)} is not a range of positive factors, low to high")
        limits = {"flip": 1.0, "rotate": 180.0, "translate": 1.0, "brightness": 1.0, "contrast": 1.0}
        for name, limit in (limits | {"saturation": 1.0, "hue": 0.5, "erase": 1.0}).items():
            if not 0 <= getattr(self, name) <= limit:
                raise UserError(f"{name}={getattr(self, name)} is not between 0 and {limit:g}")
        if self.shift < 0:
            raise UserError(f"shift={self.shift} is negative; give a number of pixels")
        if self.policy is not None:
            check_policy(self.policy)

    def __call__(self, image: Image.Image, preprocess: Preprocess, rng: np.random.Generator) -> Image.Image:
        """An RGB image, changed at random, at the model's size. Noise comes later: see :meth:`add_noise`."""
        image = preprocess.resize(image, self._box(image, preprocess, rng))
        if self.flip and rng.random() < self.flip:
            image = functional.horizontal_flip(image)
        image = recolour(self._move(self._shift(image, rng), rng), self, rng)
        if self.policy is None:
            return image
        with seeded_globals(rng):
            return policy_transform(self.policy, min(preprocess.size), preprocess.mean)(image)

    def add_noise(self, image: Tensor, rng: np.random.Generator) -> None:
        """Erase a rectangle of the normalised ``image (3, H, W)``, in place, as often as ``erase`` says."""
        if self.erase:
            with seeded_globals(rng):
                eraser(self.erase)(image)

    def _box(self, image: Image.Image, preprocess: Preprocess, rng: np.random.Generator) -> Box:
        width, height = image.size
        if self.crop_area is None:
            return preprocess.crop_box(width, height)
        rows, columns = preprocess.size
        low, high = self.crop_stretch
        aspect = columns / rows * math.exp(rng.uniform(math.log(low), math.log(high)))
        area = width * height * rng.uniform(*self.crop_area)
        across, down = math.sqrt(area * aspect), math.sqrt(area / aspect)
        fit = min(1.0, width / across, height / down)  # a crop that does not fit keeps its shape
        left, top = rng.uniform(0, 1) * (width - across * fit), rng.uniform(0, 1) * (height - down * fit)
        left, top = max(left, 0.0), max(top, 0.0)
        return left, top, min(left + across * fit, width), min(top + down * fit, height)

    def _shift(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        if not self.shift:
            return image
        left, top = (int(n) for n in rng.integers(-self.shift, self.shift, size=2, endpoint=True))
        return image.crop((left, top, left + image.width, top + image.height))

    def _move(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        if not self.rotate and not self.translate and self.scale == (1.0, 1.0):
            return image
        shift = [rng.uniform(-self.translate, self.translate) * side for side in image.size]
        return functional.affine(
            image,
            angle=rng.uniform(-self.rotate, self.rotate),
            translate=shift,
            scale=rng.uniform(*self.scale),
            shear=[0.0, 0.0],
            interpolation=InterpolationMode.BILINEAR,
        )


class Colours(Protocol):
    """How far colours may change: 0.2 is between 0.8 and 1.2 times, the hue by shares of the circle."""

    @property
    def brightness(self) -> float: ...
    @property
    def contrast(self) -> float: ...
    @property
    def saturation(self) -> float: ...
    @property
    def hue(self) -> float: ...


def recolour(image: Picture, limits: Colours, rng: np.random.Generator) -> Picture:
    """Change the colours of an image at random, within the limits."""
    for strength, adjust in (
        (limits.brightness, functional.adjust_brightness),
        (limits.contrast, functional.adjust_contrast),
        (limits.saturation, functional.adjust_saturation),
    ):
        if strength:
            image = adjust(image, rng.uniform(1 - strength, 1 + strength))
    if limits.hue:
        image = functional.adjust_hue(image, rng.uniform(-limits.hue, limits.hue))
    return image


PRESETS = {
    "none": Augment(),
    "digits": Augment(rotate=10, translate=0.1, scale=(0.9, 1.1)),
    "photo": Augment(crop_area=(0.25, 1.0), flip=0.5),
    "imagenet": Augment(crop_area=(0.08, 1.0), flip=0.5),  # as ImageNet is trained on everywhere
    "cifar": Augment(shift=4, flip=0.5),
}


def as_augment(augment: Augment | str) -> Augment:
    """An :class:`Augment`, or the preset of that name."""
    if isinstance(augment, Augment):
        return augment
    if augment not in PRESETS:
        raise unknown("augmentation", augment, PRESETS)
    return PRESETS[augment]


# timm's AutoAugment, RandAugment, AugMix and random erasing, drawn from the generator of each item.

AUTO_AUGMENT = ("original", "originalr", "v0", "v0r", "3a")
KINDS = ("rand", "augmix", *AUTO_AUGMENT)
_NUMBER = r"\d+(\.\d+)?"
# What may follow the kind. timm passes over a section that it does not know; here it is an error.
_SECTIONS = {
    "rand": rf"(m\d+|n\d+|p{_NUMBER}|mstd{_NUMBER}|mmax\d+|inc[01]|t(weights|3a|3aw))",
    "augmix": rf"(m\d+|w\d+|d\d+|a{_NUMBER}|b[01]|mstd{_NUMBER})",
}
Mean = tuple[float, float, float]


def check_policy(policy: str) -> None:
    """:class:`UserError` unless timm understands every part of ``policy``."""
    kind, *sections = policy.split("-")
    if kind not in KINDS:
        raise unknown("augmentation policy", kind, KINDS)
    allowed = _SECTIONS.get(kind, rf"mstd{_NUMBER}")
    for section in sections:
        if not re.fullmatch(allowed, section):
            raise UserError(
                f"augmentation policy {policy!r}: {section!r} is not understood; "
                "write for example 'rand-m9-mstd0.5-inc1', 'original-mstd0.5' or 'augmix-m5-w4-d2'"
            )


@functools.cache
def policy_transform(policy: str, size: int, mean: Mean) -> Callable[[Image.Image], Image.Image]:
    """timm's transform for images whose shorter side is ``size``; what it uncovers gets the colour ``mean``.

    It draws from the global generators.
    """
    hints = {
        "translate_const": int(size * 0.45),
        "img_mean": tuple(min(255, round(255 * channel)) for channel in mean),
        "interpolation": Image.Resampling.BICUBIC,
    }
    kind = policy.split("-")[0]
    if kind == "rand":
        return rand_augment_transform(policy, hints)
    if kind == "augmix":
        return augment_and_mix_transform(policy, hints | {"translate_pct": 0.3})
    return auto_augment_transform(policy, hints)


@functools.cache
def eraser(probability: float) -> RandomErasing:
    """timm's random erasing with noise, one rectangle per image; it draws from the global generators."""
    return RandomErasing(probability, mode="pixel", max_count=1, device="cpu")


# timm's Mixup and CutMix, with random numbers that the step decides.


class Mix:
    """Blends each image with its mirror place in the batch, by Mixup or CutMix, half of the time each.

    ``mixup`` and ``cutmix`` are the parameters of their Beta distributions; 0 leaves one of them out. All
    images of a batch are blended alike.
    """

    def __init__(self, *, mixup: float, cutmix: float, smoothing: float, classes: int) -> None:
        self.mixup = Mixup(mixup, cutmix, label_smoothing=smoothing, num_classes=classes)

    def __call__(self, images: Tensor, labels: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """``images (B, 3, H, W)``, changed in place, and what to expect of them: ``(B, classes)``.

        The last one of an odd number has no partner and stays as it is.
        """
        even = len(images) - len(images) % 2
        targets = mixup_target(labels, self.mixup.num_classes, 1.0, self.mixup.label_smoothing)
        if even:
            with seeded_globals(rng):
                _, mixed = self.mixup(images[:even], labels[:even])
            targets = torch.cat([mixed, targets[even:]])
        return images, targets
