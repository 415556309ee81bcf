"""The 1,797 handwritten digits that scikit-learn carries: real data without a download."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visualtokens.data.base import ImageDataset, Split, check_split

CLASSES = [str(digit) for digit in range(10)]


class Digits(ImageDataset):
    """8×8 digits, light on black: 1,437 to train and 360 to validate, in the same mix of classes.

    The split is always the same one, whatever the seed of a training run.
    """

    def __init__(self, split: Split) -> None:
        check_split(split)
        images, labels = _load()
        self.spec = "digits"
        self.classes = list(CLASSES)
        self.rows = _rows(split)  # (n,): where each item is in scikit-learn's set
        self.images = images[self.rows]  # (n, 8, 8) uint8
        self.labels = labels[self.rows]  # (n,)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]).convert("RGB"), int(self.labels[index])

    def path(self, index: int) -> str:
        """``digits[17]`` is row 17 of scikit-learn's set, so the two splits share no name."""
        return f"digits[{self.rows[index]}]"


@cache
def _load() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), from 0..16
    return images, bunch.target.astype(np.int64)


@cache
def _rows(split: Split) -> NDArray[np.int64]:
    from sklearn.model_selection import train_test_split

    _, labels = _load()
    train, val = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    return np.sort(train if split == "train" else val)
