"""What a loader yields: batches of images, and a running count of those that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from visualtokens.data.base import Share
from visualtokens.data.decode import BadImage
from visualtokens.errors import UserError

T = TypeVar("T")


class ImageBatch:
    """Base of the batches of all tasks: the readable images, possibly none, and the errors of the others.

    Subclasses are dataclasses. Every field except ``bad`` has one entry per image: a tensor ``(B, …)``, or a
    tuple of B tensors or records. A record has the methods ``to``, ``pin_memory`` and ``tensors``.
    """

    images: Any
    index: Tensor  # (B,) int64: position in the dataset, or in the part of a stream that one worker reads
    bad: tuple[BadImage, ...]

    on_device: ClassVar[tuple[str, ...]]  # the fields that model and loss use
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __len__(self) -> int:
        """The number of images."""
        return len(self.images)

    def to(self, device: torch.device, *, memory_format: torch.memory_format) -> Self:
        """The batch with images and targets on the device; a stacked image tensor takes the memory format."""

        def move(entry: Any) -> Any:
            if isinstance(entry, Tensor) and entry.ndim == 4:
                return entry.to(device, memory_format=memory_format, non_blocking=True)
            return entry.to(device, non_blocking=True)

        return self._on_device(move)

    def pin_memory(self) -> Self:
        """The batch in page-locked memory, for asynchronous copies to a GPU; called by ``DataLoader``."""
        return self._on_device(lambda entry: entry.pin_memory())

    def split(self, parts: int) -> list[Self]:
        """The batch divided into ``parts`` of about the same size; the first one carries ``bad``."""
        if parts == 1:
            return [self]
        names = [field.name for field in fields(self) if field.name != "bad"]
        pieces = []
        for part in range(parts):
            positions = Share(part, parts).of(len(self))
            taken = {name: _take(getattr(self, name), positions) for name in names}
            pieces.append(replace(self, **taken, bad=() if part else self.bad))
        return pieces

    def share_from_worker(self) -> None:
        """In a worker process, move all tensors to shared memory.

        Otherwise the queue's thread copies them and starts its OpenMP runtime, whose locks may have been held
        at the fork: the worker would hang.
        """
        if get_worker_info() is not None:
            for field in fields(self):
                for tensor in _tensors(getattr(self, field.name)):
                    tensor.share_memory_()

    def _on_device(self, function: Callable[[Any], Any]) -> Self:
        """The batch with ``function`` applied to every tensor or record in the fields of ``on_device``."""
        changed = {}
        for name in self.on_device:
            value = getattr(self, name)
            changed[name] = tuple(map(function, value)) if isinstance(value, tuple) else function(value)
        return replace(self, **changed)


def _take(value: Any, positions: NDArray[np.int64]) -> Any:
    if isinstance(value, Tensor):
        return value[torch.from_numpy(positions)]
    return tuple(value[i] for i in positions.tolist())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for entry in value:
            yield from _tensors(entry)
    elif not isinstance(value, BadImage):
        yield from value.tensors()


@dataclass(frozen=True, eq=False)
class Batch(ImageBatch):
    """Images with class labels."""

    images: Tensor  # (B, 3, H, W) float32
    labels: Tensor  # (B,) int64
    index: Tensor
    bad: tuple[BadImage, ...]

    on_device = ("images", "labels")


class Gather(Protocol):
    """The processes that read other shares of the same dataset."""

    def gather(self, item: T) -> list[T]:
        """The items of all processes, in the same order everywhere."""


class BadImages:
    """Collects ``Batch.bad`` over a run and raises once too much of the dataset is unreadable.

    >>> bad = BadImages(len(dataset))
    >>> for batch in loader:
    ...     bad.add(batch)   # UserError once more than 5 % of the images are unreadable

    With several processes: ``collect`` in each, sum ``new`` over all, and ``check`` the sum.
    """

    _SHOWN = 3

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
        """The number of unreadable images that this process has found since the last merge."""
        return len(self._new)

    @property
    def images(self) -> tuple[BadImage, ...]:
        """Each unreadable image once, in the order of discovery."""
        return (*self._known.values(), *self._new.values())

    def add(self, batch: ImageBatch) -> None:
        """Collect the errors of a batch, and raise if there are too many by now."""
        self.collect(batch.bad)
        self._check(len(self))

    def collect(self, found: Iterable[BadImage]) -> None:
        """Record unreadable images; each path counts once."""
        for bad in found:
            if bad.path not in self._known:
                self._new.setdefault(bad.path, bad)

    def check(self, team: Gather, new: int) -> None:
        """Raise in every process if there are too many; ``new`` is the sum over all processes."""
        if self._too_many(len(self._known) + new):
            self.merge(team)
            self._check(len(self))

    def merge(self, team: Gather) -> None:
        """Exchange the new entries between all processes."""
        for found in team.gather(list(self._new.values())):
            for bad in found:
                self._known.setdefault(bad.path, bad)
        self._new.clear()

    def _too_many(self, count: int) -> bool:
        return count / self.total > self.share

    def _check(self, count: int) -> None:
        if self._too_many(count):
            first = "; ".join(f"{bad.path} ({bad.reason})" for bad in self.images[: self._SHOWN])
            raise UserError(
                f"{count} of {self.total} images cannot be read, more than the {self.share:.1%} allowed: "
                f"{first}{'; …' if count > self._SHOWN else ''}. Repair or remove them, "
                "or allow a larger share"
            )
