"""Keeping count of the images that cannot be read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from visualtokens.data.batch import Batch
from visualtokens.data.decode import BadImage
from visualtokens.errors import UserError

_SHOWN = 3
T = TypeVar("T")


class Others(Protocol):
    """The processes that read other shares of the same dataset."""

    def gather(self, item: T) -> list[T]:
        """What every one of them gives, in the same order everywhere."""


class BadImages:
    """Collects ``Batch.bad`` over a run and stops it once too much of the dataset is missing.

    >>> bad = BadImages(len(dataset))
    >>> for batch in loader:
    ...     bad.add(batch)   # UserError once more than 5 % of the images turned out unreadable

    Several processes use ``collect``, tell each other ``new``, and ``check`` the sum.
    """

    def __init__(self, total: int, *, share: float = 0.05) -> None:
        if total < 1:
            raise UserError(f"total={total} is not the number of images of a dataset")
        if not 0 <= share <= 1:
            raise UserError(f"share={share} is not between 0 and 1")
        self.total = total
        self.share = share
        self._known: dict[str, BadImage] = {}  # to all processes
        self._new: dict[str, BadImage] = {}

    def __len__(self) -> int:
        return len(self._known) + self.new

    @property
    def new(self) -> int:
        """How many this process has found that the others may not know of."""
        return len(self._new)

    @property
    def images(self) -> tuple[BadImage, ...]:
        """Each unreadable image once, in the order they were met."""
        return (*self._known.values(), *self._new.values())

    def add(self, batch: Batch) -> None:
        self.collect(batch.bad)
        self._check(len(self))

    def collect(self, found: Iterable[BadImage]) -> None:
        for bad in found:
            if bad.path not in self._known:
                self._new.setdefault(bad.path, bad)

    def check(self, others: Others, new: int) -> None:
        """Raise in every process if there are too many; ``new`` is the sum over all of them."""
        if self._too_many(len(self._known) + new):
            self.merge(others)
            self._check(len(self))

    def merge(self, others: Others) -> None:
        """Let every process know what each has found."""
        for found in others.gather(list(self._new.values())):
            for bad in found:
                self._known.setdefault(bad.path, bad)
        self._new.clear()

    def _too_many(self, count: int) -> bool:
        return count / self.total > self.share

    def _check(self, count: int) -> None:
        if self._too_many(count):
            first = "; ".join(f"{bad.path} ({bad.reason})" for bad in self.images[:_SHOWN])
            raise UserError(
                f"{count} of {self.total} images cannot be read, more than the {self.share:.1%} allowed: "
                f"{first}{'; …' if count > _SHOWN else ''}. Repair or remove them, or allow a larger share"
            )
