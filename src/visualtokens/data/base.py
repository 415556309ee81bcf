"""The interface of all datasets: items, splits, shares of a process, and seeded random streams."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Generic, Literal, TypeGuard, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from visualtokens.data.walk import Share
from visualtokens.errors import UserError, unknown

T = TypeVar("T")  # the annotation of an image
Split = Literal["train", "val", "test"]
SPLITS: tuple[str, ...] = get_args(Split)
SPLIT_OF = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}

# Ceilings for counts that a file declares, checked before anything is allocated for them.
MAX_CLASSES = 100_000
MAX_IMAGES = 10_000_000_000


def check_split(split: str, *, source: str = "", has: Collection[str] = SPLITS) -> None:
    """Raise :class:`UserError` unless ``split`` is train, val or test, and one that ``source`` has."""
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    if split not in has:
        raise UserError(f"{source} has no {split} split, only {', '.join(has)}")


def held_out(names: Sequence[str], share: float, *, labels: Sequence[int] | None = None) -> NDArray[np.bool_]:
    """Which items ``(n,)`` are held out for validation: ``share`` of them, and of every label.

    The choice depends on the set of names only, not on their order, and one more name rarely moves another.
    Of a label with two or more names, at least one is held out and at least one is not, unless ``share`` is
    1. Items with the same name stay together.
    """
    if not 0 < share <= 1:
        raise UserError(f"val_share={share} must be more than 0 and at most 1")
    of_label: dict[int, set[str]] = {}
    for name, label in zip(names, labels if labels is not None else [0] * len(names), strict=True):
        of_label.setdefault(label, set()).add(name)
    chosen: set[str] = set()
    for group in of_label.values():
        count = len(group) if share == 1 else min(max(round(share * len(group)), 1), len(group) - 1)
        chosen.update(sorted(group, key=_digest)[:count])
    return np.array([name in chosen for name in names], np.bool_)


def split_rows(
    split: Split, names: Sequence[str], val_share: float, *, source: str, labels: Sequence[int] | None = None
) -> list[int]:
    """The items that are :func:`held_out` for ``val``, or the others for ``train``; never none of them."""
    held = held_out(names, val_share, labels=labels)
    rows: list[int] = np.flatnonzero(held if split == "val" else ~held).tolist()
    if not rows and split == "val":
        raise UserError(f"val_share={val_share} holds out no image of {source}: each class has one at most")
    if not rows:
        raise UserError(f"val_share={val_share} leaves no image of {source} to train on; give less")
    return rows


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()


def check_class_count(count: int, source: str) -> None:
    """Raise :class:`UserError` unless ``source`` has from 1 to :data:`MAX_CLASSES` classes."""
    if not 1 <= count <= MAX_CLASSES:
        raise UserError(f"{source} has {count:,} classes; give from 1 to {MAX_CLASSES:,}")


def is_int(value: Any) -> TypeGuard[int]:
    """Whether a value from a JSON file is an integer of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_inside(name: str) -> bool:
    """Whether a path from a dataset's file stays inside the dataset's folder: relative and without ``..``."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # no file can have this name
        return False
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


def brief(value: Any) -> str:
    """The value as it is shown in a message, at most 60 characters long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


class AnnotatedImages(Dataset[tuple[Image.Image, T]], ABC, Generic[T]):
    """RGB images, each with its annotation. An item that cannot be read raises ``BadImage``."""

    classes: list[str]
    spec: str  # the name under which `visualtokens.data.catalog` opens the dataset

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> tuple[Image.Image, T]: ...

    @abstractmethod
    def path(self, index: int) -> str:
        """The name of an item in messages: a file, or a row such as ``digits[17]``."""


class ImageDataset(AnnotatedImages[int]):
    """RGB images with one class label each."""


class Relabelled(ImageDataset):
    """A dataset with other ``classes``; ``number`` gives the number there of each of its own, by name."""

    def __init__(self, dataset: ImageDataset, classes: Sequence[str], number: Mapping[str, int]) -> None:
        self.spec, self.classes, self.dataset = dataset.spec, list(classes), dataset
        self._label_of = [number[name] for name in dataset.classes]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        image, label = self.dataset[index]
        return image, self._label_of[label]

    def path(self, index: int) -> str:
        return self.dataset.path(index)


def with_classes(dataset: ImageDataset, classes: Sequence[str], *others: Sequence[str]) -> ImageDataset:
    """The dataset with the labels of ``classes``; unchanged if it has one that is not among them, or streams.

    A test set often has only some of the classes of a model. ``others`` are other names of the same classes,
    in the same order: a dataset may have those of one of them instead.
    """
    if dataset.classes == list(classes) or isinstance(dataset, ImageStream):
        return dataset
    for names in (classes, *others):
        if set(dataset.classes) <= set(names):
            return Relabelled(dataset, classes, {name: number for number, name in enumerate(names)})
    return dataset


@dataclass(frozen=True)
class Encoded:
    """An image of a stream before decoding."""

    data: bytes
    label: int
    name: str  # for messages


class ImageStream(ImageDataset):
    """Images that can only be read sequentially, such as those in tar shards."""

    @abstractmethod
    def read(self, share: Share) -> Iterator[Encoded]:
        """The images of this share once, in stored order."""

    @abstractmethod
    def read_shuffled(self, share: Share, *, seed: int, epoch: int) -> Iterator[Encoded]:
        """The images of this share, endlessly, in an order determined by share, seed and epoch."""

    @abstractmethod
    def count(self, share: Share) -> int:
        """The number of images that :meth:`read` yields."""

    @property
    @abstractmethod
    def most_shares(self) -> int:
        """The largest number of shares the images can be divided into."""

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        raise self._no_random_access()

    def path(self, index: int) -> str:
        raise self._no_random_access()

    def _no_random_access(self) -> UserError:
        return UserError(f"{self.spec} is read in order only; unpack it into folders to pick single images")


def check_seed(seed: int) -> None:
    """Raise :class:`UserError` for a negative seed."""
    if seed < 0:
        raise UserError(f"seed={seed} is negative; give 0 or more")


def generator(seed: int, *stream: int) -> np.random.Generator:
    """The random generator of one stream, such as ``generator(seed, epoch, index)``.

    Streams of different numbers or different lengths are independent.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stream))


def derive_seed(seed: int, *stream: int) -> int:
    """A 32-bit seed of the same stream as :func:`generator`, for libraries that take an integer."""
    return int(np.random.SeedSequence(seed, spawn_key=stream).generate_state(1)[0])


_GLOBAL_STATE = threading.Lock()


@contextlib.contextmanager
def seeded_globals(rng: np.random.Generator) -> Iterator[None]:
    """Seed the global generators that timm draws from with ``rng``, and restore their state on exit.

    These are Python's, NumPy's and torch's on the CPU.
    """
    seeds = rng.integers(2**32, size=3)
    with _GLOBAL_STATE:  # one thread at a time
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
