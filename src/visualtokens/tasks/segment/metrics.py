"""How well pixels are classified, all figures from one confusion matrix over all images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from visualtokens.data import BadImage


@dataclass(frozen=True)
class SegmentEvaluation:
    """How well a model classifies the pixels of the images that could be read.

    A class that is neither in the truth nor predicted has no figures and does not count in the means. One
    that is predicted although it is nowhere in the truth has an IoU of 0, which does count.
    """

    confusion: Tensor  # (classes, classes) counts of pixels: rows are the truth, columns what the model said
    loss: float  # mean cross-entropy per pixel, without label smoothing
    images: int  # how many were read and judged
    unreadable: tuple[BadImage, ...]  # the others, by path and reason; of several processes, this one's

    @property
    def iou(self) -> list[float | None]:
        """Per class, right / (in the truth or predicted)."""
        right, truth, said = self._counts()
        return _ratios(right, truth + said - right)

    @property
    def class_accuracy(self) -> list[float | None]:
        """Per class, the share of its pixels that were found."""
        right, truth, _ = self._counts()
        return _ratios(right, truth)

    @property
    def miou(self) -> float:
        """Mean of the classes' IoU."""
        return _mean(self.iou)

    @property
    def pixel_accuracy(self) -> float:
        """The share of all pixels that are right."""
        right, truth, _ = self._counts()
        return (right.sum() / truth.sum()).item()

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "loss": self.loss,
            "miou": self.miou,
            "pixel_accuracy": self.pixel_accuracy,
            "class_accuracy": _mean(self.class_accuracy),
        }

    def _counts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Per class ``(classes,)``: pixels that are right, in the truth, predicted."""
        counts = self.confusion.double()
        return counts.diagonal(), counts.sum(1), counts.sum(0)


def _ratios(parts: Tensor, wholes: Tensor) -> list[float | None]:
    return [p / w if w else None for p, w in zip(parts.tolist(), wholes.tolist(), strict=True)]


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known)
