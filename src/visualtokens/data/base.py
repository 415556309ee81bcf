"""What every dataset of labelled images is."""

from __future__ import annotations

import contextlib
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from visualtokens.errors import UserError, unknown

# Dividing a list among several workers of the same kind: processes, or the pieces of one step.


@dataclass(frozen=True)
class Share:
    """Part number ``part`` of ``parts``."""

    part: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.part < self.parts:
            raise UserError(f"part {self.part} of {self.parts} does not exist; parts count from 0")

    def of(self, count: int) -> NDArray[np.int64]:
        """Which of ``count`` places are in this part, in order; the parts differ by one place at most.

        Mixup blends place i with place i of the list turned round. If the count allows it, both always
        fall into the same part, so that a batch is blended alike however many parts it has.
        """
        places = np.arange(count)
        if count % (2 * self.parts) == 0:
            pair = np.minimum(places, count - 1 - places)
            return places[pair % self.parts == self.part]
        return np.array_split(places, self.parts)[self.part]


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


# Random numbers that depend on what they are for, and on nothing that was drawn before.

_GLOBALS = threading.Lock()


def generator(seed: int, *stream: int) -> np.random.Generator:
    """The generator of one stream, such as ``generator(seed, epoch, index)``.

    Streams of different numbers or different lengths are independent.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stream))


def derive_seed(seed: int, *stream: int) -> int:
    """A seed of 32 bits for a library that wants one, of the same kind of stream."""
    return int(np.random.SeedSequence(seed, spawn_key=stream).generate_state(1)[0])


@contextlib.contextmanager
def seeded_globals(rng: np.random.Generator) -> Iterator[None]:
    """Let ``rng`` seed the global generators that timm draws from; afterwards they are as they were.

    These are Python's, NumPy's and torch's on the CPU.
    """
    seeds = rng.integers(2**32, size=3)
    with _GLOBALS:  # one thread at a time
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.seed(int(seeds[0]))
        np.random.seed(int(seeds[1]))
        torch.default_generator.manual_seed(int(seeds[2]))
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])


def check_seed(seed: int) -> None:
    if seed < 0:
        raise UserError(f"seed={seed} is negative; give 0 or more")
