"""From an image to the model's input: preprocessing, augmentation, Mixup and CutMix."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import (
    augment_and_mix_transform,
    auto_augment_transform,
    posterize,
    rand_augment_transform,
)
from timm.data.mixup import Mixup, mixup_target
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from visualtokens.data.base import seeded_globals
from visualtokens.data.preprocess import RGB, Box, Preprocess
from visualtokens.errors import UserError, unknown

Range = tuple[float, float]
A = TypeVar("A")  # a kind of augmentation
Picture = TypeVar("Picture", Image.Image, Tensor)

COLOUR_LIMITS = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.5}


def pixels(image: Image.Image) -> Tensor:
    """The pixels ``(H, W, 3)`` of an RGB image, uint8."""
    return torch.from_numpy(np.array(image))


@dataclass(frozen=True)
class Augment:
    """Random changes to training images; the defaults change nothing.

    Flips are off by default: mirrored digits and letters have another meaning, or none.
    """

    crop_area: Range | None = None  # fraction of the image that a random crop covers; None: evaluation crop
    crop_stretch: Range = (3 / 4, 4 / 3)  # aspect ratio of that crop, relative to the model's size
    flip: float = 0.0  # probability of a left-right flip
    rotate: float = 0.0  # degrees, in either direction
    translate: float = 0.0  # fraction of each side, in either direction
    scale: Range = (1.0, 1.0)
    brightness: float = 0.0  # 0.2: a factor of 0.8 to 1.2; likewise contrast and saturation
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # fraction of the colour circle, in either direction, at most 0.5
    shift: int = 0  # whole pixels at the model's size, in either direction; uncovered pixels are black
    policy: str | None = None  # timm's: rand-m9-mstd0.5-inc1, original (AutoAugment), augmix-m3
    erase: float = 0.0  # probability that a rectangle is replaced by noise

    def __post_init__(self) -> None:
        if self.crop_area is not None and not 0 < self.crop_area[0] <= self.crop_area[1] <= 1:
            raise UserError(f"crop_area={self.crop_area} is not a range of shares between 0 and 1")
        for name in ("crop_stretch", "scale"):
            check_factors(name, getattr(self, name))
        limits = {"flip": 1.0, "rotate": 180.0, "translate": 1.0, "erase": 1.0}
        for name, limit in (limits | COLOUR_LIMITS).items():
            check_limit(name, getattr(self, name), limit)
        if self.shift < 0:
            raise UserError(f"shift={self.shift} is negative; give a number of pixels")
        if self.policy is not None:
            check_policy(self.policy)

    def __call__(self, image: Image.Image, preprocess: Preprocess, rng: np.random.Generator) -> Image.Image:
        """The RGB image at the model's size, randomly changed by everything but :meth:`random_erasing`."""
        image = preprocess.resize(image, self._crop_box(image, preprocess, rng))
        if self.flip and rng.random() < self.flip:
            image = functional.horizontal_flip(image)
        image = self._affine(self._shift(image, rng), rng)
        image = jitter_colours(
            image,
            rng,
            brightness=self.brightness,
            contrast=self.contrast,
            saturation=self.saturation,
            hue=self.hue,
        )
        if self.policy is None:
            return image
        with seeded_globals(rng):
            return policy_transform(self.policy, min(preprocess.size), preprocess.mean)(image)

    def random_erasing(self, image: Tensor, rng: np.random.Generator) -> None:
        """Replace a rectangle of the normalised ``image (3, H, W)`` by noise, in place, if drawn."""
        if self.erase:
            with seeded_globals(rng):
                eraser(self.erase)(image)

    def _crop_box(self, image: Image.Image, preprocess: Preprocess, rng: np.random.Generator) -> Box:
        width, height = image.size
        if self.crop_area is None:
            return preprocess.crop_box(width, height)
        rows, columns = preprocess.size
        low, high = self.crop_stretch
        aspect = columns / rows * math.exp(rng.uniform(math.log(low), math.log(high)))
        area = width * height * rng.uniform(*self.crop_area)
        across, down = math.sqrt(area * aspect), math.sqrt(area / aspect)
        fit = min(1.0, width / across, height / down)  # a crop that does not fit keeps its aspect ratio
        left, top = rng.uniform(0, 1) * (width - across * fit), rng.uniform(0, 1) * (height - down * fit)
        left, top = max(left, 0.0), max(top, 0.0)
        return left, top, min(left + across * fit, width), min(top + down * fit, height)

    def _shift(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        if not self.shift:
            return image
        left, top = (int(n) for n in rng.integers(-self.shift, self.shift, size=2, endpoint=True))
        return image.crop((left, top, left + image.width, top + image.height))

    def _affine(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
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


def jitter_colours(
    image: Picture,
    rng: np.random.Generator,
    *,
    brightness: float,
    contrast: float,
    saturation: float,
    hue: float,
) -> Picture:
    """The image with random brightness, contrast, saturation and hue within the given limits."""
    for limit, adjust in (
        (brightness, functional.adjust_brightness),
        (contrast, functional.adjust_contrast),
        (saturation, functional.adjust_saturation),
    ):
        if limit:
            image = adjust(image, rng.uniform(1 - limit, 1 + limit))
    if hue:
        image = functional.adjust_hue(image, rng.uniform(-hue, hue))
    return image


def check_factors(name: str, factors: Range) -> None:
    """Raise :class:`UserError` unless the option is a range of positive factors."""
    low, high = factors
    if not 0 < low <= high:
        raise UserError(f"{name}={(low, high)} is not a range of positive factors, low to high")


def check_limit(name: str, value: float, limit: float) -> None:
    """Raise :class:`UserError` unless the option is between 0 and its limit."""
    if not 0 <= value <= limit:
        raise UserError(f"{name}={value} is not between 0 and {limit:g}")


AUTO_AUGMENT = ("original", "originalr", "v0", "v0r", "3a")
POLICIES = ("rand", "augmix", *AUTO_AUGMENT)
_NUMBER = r"\d+(\.\d+)?"
# The sections that may follow the kind of policy. timm ignores unknown ones; here they are errors.
_SECTIONS = {
    "rand": rf"(m\d+|n\d+|p{_NUMBER}|mstd{_NUMBER}|mmax\d+|inc[01]|t(weights|3a|3aw))",
    "augmix": rf"(m\d+|w\d+|d\d+|a{_NUMBER}|b[01]|mstd{_NUMBER})",
}


def check_policy(policy: str) -> None:
    """Raise :class:`UserError` unless timm understands every section of ``policy``."""
    kind, *sections = policy.split("-")
    if kind not in POLICIES:
        raise unknown("augmentation policy", kind, POLICIES)
    allowed = _SECTIONS.get(kind, rf"mstd{_NUMBER}")
    for section in sections:
        if not re.fullmatch(allowed, section):
            raise UserError(
                f"augmentation policy {policy!r}: {section!r} is not understood; "
                "write for example 'rand-m9-mstd0.5-inc1', 'original-mstd0.5' or 'augmix-m5-w4-d2'"
            )


@functools.cache
def policy_transform(policy: str, size: int, mean: RGB) -> Callable[[Image.Image], Image.Image]:
    """timm's transform for images with short side ``size``; it draws from the global generators.

    Uncovered pixels get the colour ``mean``.
    """
    hints = {
        "translate_const": int(size * 0.45),
        "img_mean": tuple(min(255, round(255 * channel)) for channel in mean),
        "interpolation": Image.Resampling.BICUBIC,
    }
    kind = policy.split("-")[0]
    if kind == "rand":
        transform = rand_augment_transform(policy, hints)
    elif kind == "augmix":
        transform = augment_and_mix_transform(policy, hints | {"translate_pct": 0.3})
    else:
        transform = auto_augment_transform(policy, hints)
    groups = getattr(transform, "policy", None) or [transform.ops]
    for operation in (operation for group in groups for operation in group):
        if operation.aug_fn is posterize:
            operation.aug_fn = _posterize
    return transform


def _posterize(image: Image.Image, bits_to_keep: int, **options: Any) -> Image.Image:
    """timm's operation with at least one bit: its policies reach 0, which Pillow refuses since version 13."""
    return posterize(image, max(1, bits_to_keep), **options)


@functools.cache
def eraser(probability: float) -> RandomErasing:
    """timm's random erasing with noise, one rectangle per image; it draws from the global generators."""
    return RandomErasing(probability, mode="pixel", max_count=1, device="cpu")


PRESETS = {
    "none": Augment(),
    "digits": Augment(rotate=10, translate=0.1, scale=(0.9, 1.1)),
    "photo": Augment(crop_area=(0.25, 1.0), flip=0.5),
    "imagenet": Augment(crop_area=(0.08, 1.0), flip=0.5),  # the standard ImageNet crops
    "cifar": Augment(shift=4, flip=0.5),
}
"""The augmentations of ``--augment``, by name."""


def as_augment(augment: A | str, presets: Mapping[str, A]) -> A:
    """The preset of that name, or ``augment`` itself if it is not a name."""
    if not isinstance(augment, str):
        return augment
    if augment not in presets:
        raise unknown("augmentation", augment, presets)
    return presets[augment]


class Mix:
    """timm's Mixup and CutMix, one of them per batch, with equal probability.

    Image i is blended with image B - 1 - i, with one weight for the whole batch. ``mixup`` and ``cutmix`` are
    the parameters of their Beta distributions; 0 disables one of them.
    """

    def __init__(self, *, mixup: float, cutmix: float, smoothing: float, classes: int) -> None:
        self.mixup = Mixup(mixup, cutmix, label_smoothing=smoothing, num_classes=classes)

    def __call__(self, images: Tensor, labels: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """``images (B, 3, H, W)``, changed in place, and their soft targets ``(B, classes)``.

        The last image of an odd number has no partner and is not changed.
        """
        even = len(images) - len(images) % 2
        targets = mixup_target(labels, self.mixup.num_classes, 1.0, self.mixup.label_smoothing)
        if even:
            with seeded_globals(rng):
                _, mixed = self.mixup(images[:even], labels[:even])
            targets = torch.cat([mixed, targets[even:]])
        return images, targets
