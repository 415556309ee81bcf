"""What every dataset of labelled images is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, get_args

from PIL import Image
from torch.utils.data import Dataset

from visualtokens.errors import unknown

Split = Literal["train", "val"]
SPLITS: tuple[str, ...] = get_args(Split)


class ImageDataset(Dataset[tuple[Image.Image, int]], ABC):
    """RGB images with a class each. An item that cannot be read raises ``BadImage``."""

    classes: list[str]
    spec: str  # what `open_dataset` makes it from

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> tuple[Image.Image, int]: ...

    @abstractmethod
    def path(self, index: int) -> str:
        """How to name an item to a person: a file, or a row such as ``digits[17]``."""


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
