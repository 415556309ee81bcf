"""Predictions of one image, and the classes of a classifier. Needs no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visualtokens.errors import UserError
from visualtokens.tables import printable

if TYPE_CHECKING:
    from torch import Tensor

TOP = 5  # classes of a prediction


class Prediction(ABC):
    """What a model predicts for one image."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as JSON values."""

    @abstractmethod
    def text(self) -> str:
        """Return the prediction as lines of text."""

    def rows(self) -> list[list[str | float | int | None]]:
        """Return the prediction as rows of a table with the task's :meth:`~Task.columns`; maybe none."""
        raise NotImplementedError

    def save(self, image: Image.Image, folder: Path, name: str) -> dict[str, Path]:
        """Write the task's ``pictures`` as ``<folder>/<name>_<ending>.png``; return their paths by kind."""
        return {}


@dataclass(frozen=True, eq=False)
class Classification(Prediction):
    """The class probabilities of one image."""

    probabilities: Tensor | NDArray[np.float32]  # (classes,) float32, on the CPU
    classes: Sequence[str]
    shown: int = TOP  # classes in the dictionary and the text

    @property
    def top(self) -> list[tuple[str, float]]:
        """The most probable classes with their probabilities, highest first."""
        values = np.asarray(self.probabilities)
        order = np.where(np.isnan(values), -np.inf, -values).argsort(kind="stable")  # NaN must be seen
        highest = order[: min(self.shown, len(self.classes))].tolist()
        return [(self.classes[i], float(values[i])) for i in highest]

    def to_dict(self) -> dict[str, Any]:
        return {"classes": [{"class": name, "probability": p} for name, p in self.top]}

    def text(self) -> str:
        return "\n".join(f"  {p:6.1%}  {printable(name)}" for name, p in self.top)

    def rows(self) -> list[list[str | float | int | None]]:
        return [[value for pair in self.top for value in pair]]


def top_columns(top: int, classes: int) -> dict[str, type]:
    """Return the columns of :meth:`Classification.rows`: label, probability, label_2, probability_2 …"""
    check_top(top)
    endings = ["", *(f"_{i}" for i in range(2, min(top, classes) + 1))]
    kinds: tuple[tuple[str, type], ...] = (("label", str), ("probability", float))
    return {f"{name}{ending}": kind for ending in endings for name, kind in kinds}


def check_top(top: int) -> None:
    """Raise :class:`UserError` unless ``top`` is a number of classes."""
    if top < 1:
        raise UserError(f"top={top} must be at least 1")
