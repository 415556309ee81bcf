"""How faithful our maps are, measured beside those of other methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.explain.classifier import check_positive, evaluating, input_like, probabilities
from visualtokens.explain.curves import area, deletion, foreground_auroc, insertion, pointing
from visualtokens.explain.geometry import Floats
from visualtokens.explain.saliency import METHODS, Saliency, Setting, make_method

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = 24


@dataclass(frozen=True)
class Score:
    """One method on one image."""

    deletion: Floats  # (steps + 1,)
    insertion: Floats  # (steps + 1,)
    pointing: float | None = None  # without a mask there is none
    auroc: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; :meth:`from_dict` reads it."""
        return {
            "deletion": np.asarray(self.deletion).round(5).tolist(),
            "insertion": np.asarray(self.insertion).round(5).tolist(),
            "pointing": self.pointing,
            "auroc": self.auroc,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Score:
        return cls(
            np.asarray(values["deletion"], dtype=np.float64),
            np.asarray(values["insertion"], dtype=np.float64),
            values["pointing"],
            values["auroc"],
        )


@dataclass(frozen=True)
class Mean:
    """A mean over images and its standard error; NaN where nothing could be measured."""

    value: float
    error: float
    images: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Mean:
        found = np.array([v for v in values if v is not None and np.isfinite(v)])
        if not len(found):
            return cls(np.nan, np.nan, 0)
        error = found.std(ddof=1) / np.sqrt(len(found)) if len(found) > 1 else np.nan
        return cls(float(found.mean()), float(error), len(found))

    def __str__(self) -> str:
        if not self.images:
            return "–"
        return f"{self.value:.3f}" + (f" ± {self.error:.3f}" if np.isfinite(self.error) else "")


@dataclass(frozen=True)
class Faithfulness:
    """The scores of every method on the same images."""

    scores: Mapping[str, Sequence[Score]]  # by method

    @property
    def images(self) -> int:
        return max(map(len, self.scores.values()), default=0)

    def means(self, method: str) -> dict[str, Mean]:
        """Areas under the deletion (low is good) and insertion curves, hits of the pointing game, AUROC."""
        scores = self.scores[method]
        return {
            "deletion": Mean.of(area(s.deletion) for s in scores),
            "insertion": Mean.of(area(s.insertion) for s in scores),
            "pointing": Mean.of(s.pointing for s in scores),
            "auroc": Mean.of(s.auroc for s in scores),
        }

    def curve(self, method: str, which: str) -> Floats:
        """``(steps + 1,)``: the mean "deletion" or "insertion" curve."""
        return np.mean([getattr(score, which) for score in self.scores[method]], axis=0)

    def rows(self) -> list[tuple[str, ...]]:
        """For each method its name and the four means, as text."""
        return [(method, *map(str, self.means(method).values())) for method in self.scores]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            method: {
                name: {"mean": mean.value, "standard_error": mean.error, "images": mean.images}
                for name, mean in self.means(method).items()
            }
            | {f"{which}_curve": self.curve(method, which).tolist() for which in ("deletion", "insertion")}
            for method in self.scores
        }

    def plot(self) -> Figure:
        """The mean deletion and insertion curves."""
        from visualtokens.explain.faithfulness_plot import figure

        return figure(self)


HEADER = ("method", "deletion ↓", "insertion ↑", "pointing ↑", "foreground AUROC ↑")


class Judge:
    """Scores the maps of several methods on one image after the other."""

    def __init__(
        self,
        model: nn.Module,
        setting: Setting,
        *,
        methods: Sequence[str] = tuple(METHODS),
        steps: int = STEPS,
    ) -> None:
        check_positive(steps=steps, batch=setting.batch)
        if not methods:
            raise UserError(f"no methods to judge; give some of {', '.join(METHODS)}")
        self.model = model
        self.setting = setting
        self.steps = steps
        self.methods: dict[str, Saliency] = {name: make_method(name, model, setting) for name in methods}

    def __call__(self, x: Tensor, mask: NDArray[np.integer] | None = None) -> dict[str, Score]:
        """Judge the explanations of what the model predicts for ``x (3, H, W)``.

        ``mask (H, W)`` says where the foreground is: 1, 0, and -1 where that is undecided.
        """
        like = input_like(self.model)
        x = x.to(like.device)
        with evaluating(self.model):
            with torch.no_grad():
                target = int(probabilities(self.model, x.to(like.dtype).unsqueeze(0)).argmax())

            def probability(images: Tensor) -> Tensor:
                return probabilities(self.model, images.to(like.dtype))[:, target]

            return {
                name: self._score(probability, x, saliency(x, target), mask)
                for name, saliency in self.methods.items()
            }

    def _score(
        self,
        probability: Callable[[Tensor], Tensor],
        x: Tensor,
        heat: Floats,
        mask: NDArray[np.integer] | None,
    ) -> Score:
        steps, batch = self.steps, self.setting.batch
        with torch.no_grad():
            return Score(
                deletion(probability, x, heat, steps=steps, batch=batch),
                insertion(probability, x, heat, steps=steps, batch=batch),
                None if mask is None else pointing(heat, mask),
                None if mask is None else foreground_auroc(heat, mask),
            )


def gather(scores: Iterable[Mapping[str, Score]]) -> Faithfulness:
    """The scores of many images, by method."""
    by_method: dict[str, list[Score]] = {}
    for one in scores:
        for method, score in one.items():
            by_method.setdefault(method, []).append(score)
    return Faithfulness(by_method)
