"""Random changes to training images, drawn from the generator of each item."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from visualtokens.data.policy import check_policy, eraser, policy_transform
from visualtokens.data.preprocess import Box, Preprocess
from visualtokens.data.randomness import seeded_globals
from visualtokens.errors import UserError, unknown

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
