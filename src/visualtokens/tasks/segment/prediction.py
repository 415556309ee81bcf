"""The predicted class of every pixel. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visualtokens.data.preprocess import Colour
from visualtokens.tables import printable
from visualtokens.tasks.prediction import Prediction
from visualtokens.tasks.segment.pictures import overlay, save_prediction

if TYPE_CHECKING:
    from torch import Tensor

SHOWN = 30  # classes in the text of a prediction


@dataclass(frozen=True, eq=False)
class Segmentation(Prediction):
    """The predicted class of every pixel of one image."""

    labels: Tensor | NDArray[np.uint8]  # (H, W) uint8, on the CPU
    classes: Sequence[str]
    colours: Sequence[Colour] | None = None  # of the dataset that the model was trained on

    @property
    def shares(self) -> dict[str, float]:
        """The share of the pixels of each class that occurs, largest first."""
        values = np.asarray(self.labels)
        counts = np.bincount(values.ravel(), minlength=len(self.classes))  # (classes,)
        order = (-counts).argsort(kind="stable").tolist()
        return {self.classes[i]: int(counts[i]) / values.size for i in order if counts[i]}

    def to_dict(self) -> dict[str, Any]:
        return {"shares": self.shares}

    def text(self) -> str:
        return "\n".join(f"  {p:6.1%}  {printable(name)}" for name, p in list(self.shares.items())[:SHOWN])

    def rows(self) -> list[list[str | float | int | None]]:
        return [[name, share] for name, share in self.shares.items()]

    def draw(self, image: Image.Image) -> Image.Image:
        """Return the image with every pixel tinted by its class, and a legend."""
        return overlay(image, self.labels, classes=self.classes, colours=self.colours)

    def save(self, image: Image.Image, folder: Path, name: str) -> dict[str, Path]:
        drawn, indices = save_prediction(
            image, self.labels, classes=self.classes, colours=self.colours, out=folder, name=name
        )
        return {"overlay": drawn, "classes": indices}
