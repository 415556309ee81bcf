"""What every dataset of labelled images is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from PIL import Image
from torch.utils.data import Dataset

from visualtokens.data.share import Share
from visualtokens.errors import UserError, unknown

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


@dataclass(frozen=True)
class Encoded:
    """An image of a stream before it is decoded, and its name for people."""

    data: bytes
    label: int
    name: str


class ImageStream(ImageDataset):
    """Images that can only be read one after the other, such as those in tar shards."""

    @abstractmethod
    def read(self, share: Share) -> Iterator[Encoded]:
        """The images of this share once, in the order they are stored."""

    @abstractmethod
    def read_shuffled(self, share: Share, *, seed: int, epoch: int) -> Iterator[Encoded]:
        """The images of this share without end, in an order that share, seed and epoch decide."""

    @abstractmethod
    def count(self, share: Share) -> int:
        """How many images :meth:`read` gives."""

    @property
    @abstractmethod
    def most_shares(self) -> int:
        """Into how many shares the images can be divided."""

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        raise self._in_order_only()

    def path(self, index: int) -> str:
        raise self._in_order_only()

    def _in_order_only(self) -> UserError:
        return UserError(f"{self.spec} is read in order only; unpack it into folders to pick single images")


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
