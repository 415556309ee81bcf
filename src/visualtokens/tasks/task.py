"""The seam between the training engine and what is learned.

The engine of ``visualtokens.train`` knows optimizers, schedules, averages, processes, signals and files. It
knows nothing of labels, masks or boxes: a :class:`Task` brings the model, the batches, the loss and the
judgement. A new task is a subclass here and one entry in ``visualtokens.train.tasks``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from visualtokens.data import BadImage, Share


class Examples(Protocol):
    """What a batch must be able to do."""

    @property
    def bad(self) -> tuple[BadImage, ...]:
        """The images of the batch that could not be read and are not in it."""

    def __len__(self) -> int:
        """How many images are in it, possibly none."""

    def to(self, device: torch.device, *, memory_format: torch.memory_format) -> Self:
        """The batch on the device."""

    def split(self, parts: int) -> list[Self]:
        """The batch in several pieces of about the same size, each of at least one image."""


E = TypeVar("E", bound=Examples)
E_co = TypeVar("E_co", bound=Examples, covariant=True)


class ExampleLoader(Protocol[E_co]):
    """What gives the batches of an epoch."""

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Choose the epoch of the next iteration and the batch it begins with."""

    def __len__(self) -> int:
        """Batches of a whole epoch; the same number in every process."""

    def __iter__(self) -> Iterator[E_co]: ...


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How the engine wants batches loaded."""

    batch: int  # images per step, of all processes together
    seed: int = 0
    workers: int = 0
    share: Share = field(default_factory=Share)  # which part of every batch is this process's
    pin_memory: bool = False


@dataclass(frozen=True, eq=False)
class Loss:
    """The loss of a batch, and what else to tell about it."""

    value: Tensor  # mean over the images, with its graph
    sums: Mapping[str, Tensor] = field(default_factory=dict)  # over the images; the log shows their means


class Judged(Protocol):
    """What an evaluation must tell."""

    @property
    def metrics(self) -> dict[str, float]:
        """Figures by name. ``loss`` is one of them; one that is not finite ends the run."""


J_co = TypeVar("J_co", bound=Judged, covariant=True)


class Task(ABC, Generic[E, J_co]):
    """What a model is trained for. ``model`` is new and on the CPU; the engine moves it where it trains."""

    name: str
    score: str  # the metric, higher is better, that decides which checkpoint is the best
    model: nn.Module
    classes: list[str]
    images: tuple[int, int]  # how many there are to train and to validate

    @abstractmethod
    def train_loader(self, loading: Loading) -> ExampleLoader[E]:
        """Batches to learn from: shuffled and varied as seed and epoch decide."""

    @abstractmethod
    def val_loader(self, loading: Loading) -> ExampleLoader[E]:
        """Every validation image once, unchanged."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: E, *, rng: np.random.Generator) -> Loss:
        """Call ``model`` (``self.model`` or a wrapper of it, once) and compare with what the batch wants.

        Whatever is random draws from ``rng``, which is the same for all pieces of one step, or from
        torch's global generator, which differs between processes. The engine has seeded both.
        """

    @abstractmethod
    def evaluate(self, model: nn.Module, batches: Iterable[E], *, progress: bool | None) -> J_co:
        """Judge the model. Where several processes run, each gives its share of the batches, and every one
        gets the figures of all."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What ``config.json`` must say so that the model can be built again without the data."""

    def to(self, device: torch.device) -> None:
        """Move whatever the loss needs besides the model, such as a teacher."""


# What every evaluation does besides judging.


def of_all_processes(total: Tensor) -> Tensor:
    """The sum over the processes that train together, if there are several."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    return total


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards every submodule has its own flag back."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
