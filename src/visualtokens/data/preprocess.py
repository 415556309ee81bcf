"""From an image to what a model is given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visualtokens.data.decode import as_rgb
from visualtokens.errors import UserError

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
