"""From an image to the model's input, by torch or by numpy alone. Needs no torch to be imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visualtokens.data.decode import as_rgb
from visualtokens.errors import UserError, unknown

if TYPE_CHECKING:
    from torch import Tensor

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the original
RGB = tuple[float, float, float]
Colour = tuple[int, int, int]  # red, green, blue
IGNORE = 255  # the class of pixels that neither loss nor metrics count

INTERPOLATIONS = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
    "hamming": Image.Resampling.HAMMING,
    "box": Image.Resampling.BOX,
    "nearest": Image.Resampling.NEAREST,
}


@dataclass(frozen=True)
class Preprocess:
    """Evaluation transform: resize the short side so that the crop fits, crop the centre, normalise.

    ``crop`` is the fraction of the largest centred crop that is kept, as timm's ``crop_pct``;
    ``interpolation`` is timm's, one of :data:`INTERPOLATIONS`.
    """

    size: tuple[int, int]  # (H, W)
    mean: RGB
    std: RGB
    crop: float = 1.0
    interpolation: str = "bicubic"

    def __post_init__(self) -> None:
        check_input(self.size, self.mean, self.std)
        if self.interpolation not in INTERPOLATIONS:
            raise unknown("interpolation", self.interpolation, INTERPOLATIONS)
        if not 0 < self.crop <= 1:
            raise UserError(f"crop={self.crop} is not a share of the image; give more than 0 and at most 1")

    def __call__(self, image: Image.Image) -> Tensor:
        """The model's input ``(3, H, W)`` float32."""
        import torch

        return self.normalise(torch.from_numpy(self.pixels(image)))

    def array(self, image: Image.Image) -> NDArray[np.float32]:
        """The model's input without torch, the same to the bit."""
        return normalised(self.pixels(image), self.mean, self.std)

    def pixels(self, image: Image.Image) -> NDArray[np.uint8]:
        """The pixels ``(H, W, 3)`` that the model sees, before they are normalised."""
        image = as_rgb(image)
        return np.array(self.resize(image, self.crop_box(*image.size)))

    def crop_box(self, width: int, height: int) -> Box:
        """The part of a ``width`` × ``height`` original that the model sees."""
        rows, columns = self.size
        scale = min(width / columns, height / rows) * self.crop
        # Rounding must not move the box beyond the image.
        left = max((width - columns * scale) / 2, 0.0)
        top = max((height - rows * scale) / 2, 0.0)
        return left, top, width - left, height - top

    def resize(self, image: Image.Image, box: Box) -> Image.Image:
        """The box of the image at the model's size, cropped and resized in one antialiased resampling."""
        rows, columns = self.size
        return image.resize((columns, rows), INTERPOLATIONS[self.interpolation], box=box)

    def normalise(self, values: Tensor) -> Tensor:
        """Standardised pixels: ``values (…, H, W, 3)`` uint8 to ``(…, 3, H, W)`` float32."""
        # Moving the channels is cheapest while a value is still one byte.
        return normalise(values.movedim(-1, -3).contiguous(), self.mean, self.std)


def check_input(size: tuple[int, int], mean: RGB, std: RGB) -> None:
    """Raise :class:`UserError` for an input size or statistics that no model can have."""
    if len(size) != 2 or min(size) < 1:
        raise UserError(f"size={size} is not a height and a width of at least 1")
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise UserError(f"mean={mean}, std={std}: give three numbers each, std above 0")


def normalise(values: Tensor, mean: RGB, std: RGB) -> Tensor:
    """``(x / 255 - mean) / std`` of ``values (…, 3, H, W)`` uint8, as float32."""
    import torch

    shift, scale = torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1)
    return values.float().div_(255).sub_(shift).div_(scale)


def normalised(values: NDArray[np.uint8], mean: RGB, std: RGB) -> NDArray[np.float32]:
    """:func:`normalise` without torch: ``values (H, W, 3)`` uint8 to ``(3, H, W)`` float32."""
    out = np.ascontiguousarray(values.transpose(2, 0, 1)).astype(np.float32)
    out /= np.float32(255)
    out -= np.array(mean, np.float32).reshape(3, 1, 1)
    out /= np.array(std, np.float32).reshape(3, 1, 1)
    return out


@dataclass(frozen=True)
class SegmentPreprocess:
    """Input size and normalisation of a segmentation model.

    In training, the model sees crops of ``size``. In evaluation, it sees the whole image, resized to the
    short side of ``size`` and a long side of at most ``longest`` pixels (by default four times the short
    side), or stretched to ``size`` with ``keep_ratio=False``.
    """

    size: tuple[int, int]  # (H, W)
    mean: RGB
    std: RGB
    keep_ratio: bool = True
    longest: int | None = None

    def __post_init__(self) -> None:
        check_input(self.size, self.mean, self.std)
        if self.longest is not None and self.longest < min(self.size):
            raise UserError(f"longest={self.longest} is less than the short side, {min(self.size)}")

    def __call__(self, image: Image.Image) -> Tensor:
        """The whole image ``(3, H, W)``, float32."""
        from torchvision.transforms.v2 import functional

        size = self.seen_size(*image.size)
        return self.normalise(functional.resize(functional.pil_to_tensor(image), list(size), antialias=True))

    def array(self, image: Image.Image) -> NDArray[np.float32]:
        """The whole image without torch; Pillow resizes it, and each of its 256 levels may differ by one."""
        return normalised(self.pixels(image), self.mean, self.std)

    def pixels(self, image: Image.Image, *, least: int = 1, multiple: int = 1) -> NDArray[np.uint8]:
        """The pixels ``(H, W, 3)`` that the model sees, by Pillow.

        Sides are at least ``least``, and rounded to a ``multiple``.
        """
        seen = self.seen_size(*image.size)
        height, width = (max(1, round(max(side, least) / multiple)) * multiple for side in seen)
        return np.array(as_rgb(image).resize((width, height), Image.Resampling.BILINEAR))

    def seen_size(self, width: int, height: int) -> tuple[int, int]:
        """The (height, width) at which the model sees a whole image of ``width`` × ``height``."""
        if not self.keep_ratio:
            return self.size
        short = min(self.size)
        longest = 4 * short if self.longest is None else self.longest
        scale = min(short / min(width, height), longest / max(width, height))
        return max(1, round(height * scale)), max(1, round(width * scale))

    def normalise(self, pixels: Tensor) -> Tensor:
        """Standardised pixels: ``(…, 3, H, W)`` uint8 to float32."""
        return normalise(pixels, self.mean, self.std)
