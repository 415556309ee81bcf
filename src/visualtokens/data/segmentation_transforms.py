"""From an image and its mask to what a segmentation model is given; both change together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

from visualtokens.data.decode import DAMAGE, BadImage, check_file, check_pixels
from visualtokens.data.transforms import Range, recolour
from visualtokens.errors import UserError, unknown

Pair = tuple[tv_tensors.Image, tv_tensors.Mask]  # (3, H, W) and (H, W), both uint8


@dataclass(frozen=True)
class SegmentPreprocess:
    """How large a segmentation model sees an image, and normalised by what.

    To train, it sees crops of ``size``. To judge, it sees the whole image: the short side as long as that
    of ``size``, but the long side at most ``longest`` pixels (by default four times the short side); or,
    with ``keep_ratio=False``, stretched to ``size``.
    """

    size: tuple[int, int]  # (H, W)
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    keep_ratio: bool = True
    longest: int | None = None

    def __post_init__(self) -> None:
        if len(self.size) != 2 or min(self.size) < 1:
            raise UserError(f"size={self.size} is not a height and a width of at least 1")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise UserError(f"mean={self.mean}, std={self.std}: give three numbers each, std above 0")
        if self.longest is not None and self.longest < min(self.size):
            raise UserError(f"longest={self.longest} is less than the short side, {min(self.size)}")

    def __call__(self, image: Image.Image) -> Tensor:
        """The whole image, ``(3, H, W)`` float32."""
        seen = functional.resize(as_pixels(image), list(self.seen_size(*image.size)), antialias=True)
        return self.normalise(seen)

    def seen_size(self, width: int, height: int) -> tuple[int, int]:
        """The (height, width) at which the model sees a whole image of ``width`` × ``height``."""
        if not self.keep_ratio:
            return self.size
        short = min(self.size)
        longest = 4 * short if self.longest is None else self.longest
        scale = min(short / min(width, height), longest / max(width, height))
        return max(1, round(height * scale)), max(1, round(width * scale))

    def normalise(self, pixels: Tensor) -> Tensor:
        """``(…, 3, H, W)`` uint8 to float32."""
        mean, std = torch.tensor(self.mean).view(3, 1, 1), torch.tensor(self.std).view(3, 1, 1)
        return pixels.as_subclass(Tensor).float().div_(255).sub_(mean).div_(std)


def as_pixels(image: Image.Image) -> tv_tensors.Image:
    """An RGB image as ``(3, H, W)`` uint8."""
    return tv_tensors.Image(torch.from_numpy(np.array(image)).permute(2, 0, 1))


@dataclass(frozen=True)
class SegmentAugment:
    """How far a training image may differ from the original; the defaults change nothing but crop it.

    Flips are off unless asked for: a digit or a letter in the mirror is another sign.
    """

    scale: Range = (1.0, 1.0)  # relative to the size at which the model is judged
    flip: float = 0.0  # probability of a left-right flip
    brightness: float = 0.0  # 0.2: between 0.8 and 1.2 times; likewise contrast and saturation
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # share of the colour circle, to either side, at most 0.5

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1]:
            raise UserError(f"scale={self.scale} is not a range of positive factors, low to high")
        limits = {"flip": 1.0, "brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.5}
        for name, limit in limits.items():
            if not 0 <= getattr(self, name) <= limit:
                raise UserError(f"{name}={getattr(self, name)} is not between 0 and {limit:g}")

    def __call__(
        self,
        image: Image.Image,
        mask: Mask,
        preprocess: SegmentPreprocess,
        rng: np.random.Generator,
        *,
        mirror: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """A crop of the model's size, changed at random: ``(3, H, W)`` and ``(H, W)``, both uint8.

        What the image does not reach is filled with its mean and ignored. ``mirror`` tells the class that
        each class is in a mirror (see ``mirrored_classes``).
        """
        factor = rng.uniform(*self.scale)
        size = [max(1, round(side * factor)) for side in preprocess.seen_size(*image.size)]
        pair = _resize((as_pixels(image), tv_tensors.Mask(torch.from_numpy(mask.copy()))), size)
        picture, truth = _crop(_pad(pair, preprocess), preprocess.size, rng)
        if self.flip and rng.random() < self.flip:
            picture, truth = functional.horizontal_flip(picture), functional.horizontal_flip(truth)
            truth = tv_tensors.Mask(_lookup(mirror)[truth.long()])
        return recolour(picture, self, rng).as_subclass(Tensor), truth.as_subclass(Tensor)


SEGMENT_PRESETS: Mapping[str, SegmentAugment] = {
    "none": SegmentAugment(),
    "digits": SegmentAugment(scale=(0.75, 1.5)),
    "photo": SegmentAugment(scale=(0.5, 2.0), flip=0.5),
    "coco": SegmentAugment(scale=(0.8, 1.0), flip=0.5),  # short sides of 640 to 800, as Detectron2 takes them
    # What UperNet and its successors are trained with on ADE20K: mmsegmentation's photometric distortion.
    "ade20k": SegmentAugment(
        scale=(0.5, 2.0), flip=0.5, brightness=0.125, contrast=0.5, saturation=0.5, hue=0.05
    ),
}


def as_segment_augment(augment: SegmentAugment | str) -> SegmentAugment:
    """A :class:`SegmentAugment`, or the preset of that name."""
    if isinstance(augment, SegmentAugment):
        return augment
    if augment not in SEGMENT_PRESETS:
        raise unknown("augmentation", augment, SEGMENT_PRESETS)
    return SEGMENT_PRESETS[augment]


def _resize(pair: Pair, size: list[int]) -> Pair:
    image, mask = pair
    return functional.resize(image, size, antialias=True), functional.resize(mask, size)


def _pad(pair: Pair, preprocess: SegmentPreprocess) -> Pair:
    """Right and below, up to the size of the crop."""
    image, mask = pair
    missing = [max(0, want - have) for want, have in zip(preprocess.size, mask.shape, strict=True)]
    if not any(missing):
        return pair
    border = [0, 0, missing[1], missing[0]]  # left, top, right, bottom
    mean = [round(255 * m) for m in preprocess.mean]
    return functional.pad(image, border, fill=mean), functional.pad(mask, border, fill=IGNORE)


def _crop(pair: Pair, size: tuple[int, int], rng: np.random.Generator) -> Pair:
    image, mask = pair
    top, left = (int(rng.integers(have - want + 1)) for have, want in zip(mask.shape, size, strict=True))
    return functional.crop(image, top, left, *size), functional.crop(mask, top, left, *size)


def _lookup(mirror: Sequence[int]) -> Tensor:
    table = torch.full((IGNORE + 1,), IGNORE, dtype=torch.uint8)
    table[: len(mirror)] = torch.tensor(mirror, dtype=torch.uint8)
    return table


# Masks: one class per pixel, as an image file whose values are numbers and not colours.

IGNORE = 255  # the class of pixels that nobody is asked about
FORMATS = ("PNG", "BMP", "TIFF", "PPM")  # those that keep numbers as they are
EXTENSIONS = frozenset({".png", ".bmp", ".tif", ".tiff", ".pgm"})
_NUMBERS = ("L", "P", "1", "I;16", "I;16B", "I;16L", "I")  # modes whose values can be numbers of classes

Mask = NDArray[np.uint8]  # (H, W)


class BadAnnotation(BadImage):
    """An annotation that cannot be used: its file, the image it belongs to, the field, and why."""

    def __init__(self, path: str, image_id: str, field: str, why: str) -> None:
        super().__init__(path, f"annotation of image {image_id}, {field}: {why}")
        self.image_id = image_id
        self.field = field
        self.why = why

    def __reduce__(self) -> tuple[type[BadAnnotation], tuple[str, str, str, str]]:  # type: ignore[override]
        return BadAnnotation, (self.path, self.image_id, self.field, self.why)


def read_mask(path: str | Path, *, image_id: str | None = None) -> NDArray[np.integer]:
    """The numbers ``(H, W)`` in the file; of a palette its indices, not its colours."""
    file, name = Path(path), str(path)
    image_id = file.stem if image_id is None else image_id
    try:
        check_file(file, name)
        with Image.open(file, formats=FORMATS) as image:
            check_pixels(image, name)
            if image.mode not in _NUMBERS:
                why = f"{image.mode} holds colours; save one number per pixel (a grey or palette PNG)"
                raise BadAnnotation(name, image_id, "mode", why)
            values = np.asarray(image)
    except BadAnnotation:
        raise
    except BadImage as bad:
        raise BadAnnotation(name, image_id, "file", bad.reason) from bad
    except UnidentifiedImageError as error:
        why = f"not an image in a format that keeps numbers ({', '.join(FORMATS)})"
        raise BadAnnotation(name, image_id, "file", why) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning, *DAMAGE) as error:
        why = f"damaged or unsupported: {error or type(error).__name__}"
        raise BadAnnotation(name, image_id, "file", why) from error
    return values.astype(np.uint8) if values.dtype == np.bool_ else values


def renumber(values: NDArray[np.integer], table: NDArray[np.int16], *, path: str, image_id: str) -> Mask:
    """The classes of the numbers in a file: ``table[number]``, where -1 is no number of the dataset."""
    inside = (values >= 0) & (values < len(table))
    classes = np.where(inside, table[np.where(inside, values, 0)], -1)
    if (classes < 0).any():
        row, column = np.argwhere(classes < 0)[0].tolist()
        known = np.flatnonzero(table >= 0)
        why = (
            f"{values[row, column]} at row {row}, column {column} is not a number of this dataset "
            f"({_spans(known.tolist())})"
        )
        raise BadAnnotation(path, image_id, "pixels", why)
    return classes.astype(np.uint8)


def _spans(numbers: list[int]) -> str:
    """The numbers as text: 0 to 20, 255."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans)
