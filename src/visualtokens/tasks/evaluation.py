"""What an evaluation of any task returns, and what the evaluations of the tasks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from visualtokens.data import BadImage
from visualtokens.errors import UserError
from visualtokens.progress import count as number_of


class Evaluation(Protocol):
    """The metrics of a model on a dataset."""

    @property
    def images(self) -> int:
        """Number of images that were read and evaluated."""

    @property
    def unreadable(self) -> tuple[BadImage, ...]:
        """The others; with several processes, those of this one."""

    @property
    def metrics(self) -> dict[str, float]:
        """The main metrics by name; a value that is not finite ends a training run."""

    def to_dict(self, classes: Sequence[str]) -> dict[str, Any]:
        """Return all metrics as JSON values."""

    def text(self, classes: Sequence[str]) -> str:
        """Return a summary and a table of the weakest classes."""


def sum_over_processes(total: Tensor) -> Tensor:
    """Return the sum over all training processes, in place."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    return total


def require_classes(data: str, found: Sequence[str], checkpoint: str, known: Sequence[str]) -> None:
    """Raise :class:`UserError` if a dataset has other classes than a checkpoint."""
    new = sorted(set(found) - set(known))
    if new and len(new) < len(set(found)):
        raise UserError(
            f"{data} has classes that {checkpoint} was not trained for: {_names(new)}; "
            "remove them from the data, or give another checkpoint"
        )
    if list(found) != list(known):
        raise UserError(
            f"{data} has {_brief(found)}, but {checkpoint} was trained for {_brief(known)}; "
            "the classes must be the same, in the same order"
        )


def _brief(classes: Sequence[str]) -> str:
    return f"{number_of(len(classes), 'class')} ({_names(classes)})"


def _names(classes: Sequence[str]) -> str:
    return ", ".join(classes[:3]) + (", …" if len(classes) > 3 else "")
