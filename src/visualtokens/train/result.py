"""What a training run hands back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from visualtokens.data import BadImage


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run; the model itself is in the folder ``out``."""

    out: str
    classes: list[str]
    history: list[dict[str, Any]]  # one record per whole epoch, as in log.jsonl
    accuracy: float | None  # in validation, after the last whole epoch; None if there is none
    confusion: Tensor | None  # (classes, classes) of the same evaluation: rows are the truth
    seconds: float  # of this call, all included
    images_per_second: float  # of the training steps of this call
    unreadable: tuple[BadImage, ...]  # each image that could not be read, once
    signal: int | None = None  # what ended the run early
