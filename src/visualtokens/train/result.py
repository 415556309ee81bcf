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
    score: str  # the metric that decides which epoch was the best
    evaluation: Any | None  # what the task found after the last whole epoch; None if there was none
    seconds: float  # of this call, all included
    images_per_second: float  # of the training steps of this call
    data_wait: float  # share of their time in which the model waited for images
    unreadable: tuple[BadImage, ...]  # each image that could not be read, once
    skipped: int  # steps that were skipped because loss or gradient was not finite
    leads: bool = True  # whether this process is the one of several that talks to people
    signal: int | None = None  # what ended the run early

    @property
    def metrics(self) -> dict[str, float]:
        """In validation, after the last whole epoch; empty if there is none."""
        return self.evaluation.metrics if self.evaluation else {}

    @property
    def accuracy(self) -> float | None:
        """Of a classifier."""
        return self.metrics.get("accuracy")

    @property
    def confusion(self) -> Tensor | None:
        """Of a classifier: ``(classes, classes)``, rows are the truth."""
        return getattr(self.evaluation, "confusion", None)

    @property
    def best(self) -> float | None:
        """The highest score of all epochs, which the model in ``out/best`` has."""
        return max((record[f"val_{self.score}"] for record in self.history), default=None)
