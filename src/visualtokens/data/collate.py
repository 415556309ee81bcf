"""From images to a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visualtokens.data.augment import Augment
from visualtokens.data.batch import Batch
from visualtokens.data.decode import BadImage
from visualtokens.data.preprocess import Preprocess, pixels
from visualtokens.data.workers import share_from_worker


@dataclass(frozen=True, eq=False)
class Item:
    """One image on its way into a batch."""

    values: Tensor  # (H, W, 3) uint8
    label: int
    index: int
    augment: Augment  # what is left to do once the values are normalised
    rng: np.random.Generator


def prepare(
    image: Image.Image,
    label: int,
    index: int,
    *,
    preprocess: Preprocess,
    augment: Augment,
    rng: np.random.Generator,
) -> Item:
    """Change the image at random and bring it to the model's size."""
    return Item(pixels(augment(image, preprocess, rng)), label, index, augment, rng)


@dataclass(frozen=True)
class Collate:
    """Makes one batch of items and of what could not be read."""

    preprocess: Preprocess

    def __call__(self, items: list[Item | BadImage]) -> Batch:
        good = [item for item in items if isinstance(item, Item)]
        bad = tuple(item for item in items if isinstance(item, BadImage))
        empty = torch.empty(0, *self.preprocess.size, 3, dtype=torch.uint8)
        values = torch.stack([item.values for item in good]) if good else empty  # (B, H, W, 3)
        batch = Batch(
            self.preprocess.normalise(values),
            torch.tensor([item.label for item in good], dtype=torch.int64),
            torch.tensor([item.index for item in good], dtype=torch.int64),
            bad,
        )
        for item, image in zip(good, batch.images, strict=True):
            item.augment.add_noise(image, item.rng)
        share_from_worker((batch.images, batch.labels, batch.index))
        return batch
