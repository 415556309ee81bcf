"""How faithful heat maps are: the metrics of several methods on the same images, with intervals."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.explain.baselines import METHODS, Saliency, Setting, make_method
from visualtokens.explain.importance import Floats
from visualtokens.explain.inputs import as_batch, check_positive, class_probabilities, input_like
from visualtokens.explain.metrics import (
    Ends,
    Mask,
    Probability,
    area,
    curve_ends,
    deletion,
    foreground_auroc,
    insertion,
    pointing,
    rank_correlation,
    saco,
)
from visualtokens.modes import eval_mode

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEPS, GROUPS = 24, 10  # of the curves and of SaCo
RESAMPLES = 2000  # of the bootstrap


@dataclass(frozen=True)
class Score:
    """The metrics of one method on one image."""

    deletion: Floats  # (steps + 1,)
    insertion: Floats  # (steps + 1,)
    pointing: float | None = None  # None without a mask
    auroc: float | None = None
    saco: float | None = None  # None if it was not measured

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; :meth:`from_dict` reads it."""
        return {
            "deletion": np.asarray(self.deletion).round(5).tolist(),
            "insertion": np.asarray(self.insertion).round(5).tolist(),
            "saco": self.saco,
            "pointing": self.pointing,
            "auroc": self.auroc,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Score:
        """The score that :meth:`to_dict` wrote."""
        return cls(
            np.asarray(values["deletion"], dtype=np.float64),
            np.asarray(values["insertion"], dtype=np.float64),
            values["pointing"],
            values["auroc"],
            values["saco"],
        )


class FaithfulnessEvaluator:
    """Evaluates the heat maps of several methods on one image at a time."""

    def __init__(
        self,
        model: nn.Module,
        setting: Setting,
        *,
        methods: Sequence[str] = tuple(METHODS),
        steps: int = STEPS,
        groups: int = GROUPS,
    ) -> None:
        check_positive(steps=steps, batch=setting.batch, groups=groups)
        if not methods:
            raise UserError(f"no methods to evaluate; give some of {', '.join(METHODS)}")
        self.model = model
        self.setting = setting
        self.steps, self.groups = steps, groups
        self.methods: dict[str, Saliency] = {name: make_method(name, model, setting) for name in methods}

    def evaluate(
        self, x: Tensor, mask: Mask | None = None, *, methods: Collection[str] | None = None
    ) -> dict[str, Score]:
        """The score of each method for the class predicted on ``x (3, H, W)``.

        ``mask (H, W)`` is the foreground: 1, 0, or -1 where undecided. ``methods`` are some of the
        evaluator's, by default all.
        """
        like = input_like(self.model)
        x = x.to(like.device)
        with eval_mode(self.model):
            with torch.no_grad():
                target = int(class_probabilities(self.model, as_batch(self.model, x)).argmax())

            def probability(images: Tensor) -> Tensor:
                return class_probabilities(self.model, images.to(like.dtype))[:, target]

            with torch.no_grad():
                ends = curve_ends(probability, x)
            return {
                name: self._score(probability, x, saliency(x, target), mask, ends)
                for name, saliency in self.methods.items()
                if methods is None or name in methods
            }

    def _score(
        self, probability: Probability, x: Tensor, heat: Floats, mask: Mask | None, ends: tuple[Ends, Ends]
    ) -> Score:
        steps, batch = self.steps, self.setting.batch
        with torch.no_grad():
            return Score(
                deletion(probability, x, heat, steps=steps, batch=batch, ends=ends[0]),
                insertion(probability, x, heat, steps=steps, batch=batch, ends=ends[1]),
                None if mask is None else pointing(heat, mask),
                None if mask is None else foreground_auroc(heat, mask),
                saco(probability, x, heat, groups=self.groups, batch=batch),
            )


@dataclass(frozen=True)
class Mean:
    """A mean over images with its standard error and 95 % bootstrap interval; NaN without values."""

    value: float
    error: float
    images: int
    interval: tuple[float, float] = (math.nan, math.nan)

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Mean:
        """The mean of the finite values."""
        finite = np.array([v for v in values if v is not None and np.isfinite(v)])
        if not len(finite):
            return cls(np.nan, np.nan, 0)
        error = finite.std(ddof=1) / np.sqrt(len(finite)) if len(finite) > 1 else np.nan
        return cls(float(finite.mean()), float(error), len(finite), bootstrap_interval(finite))

    def __str__(self) -> str:
        if not self.images:
            return "–"
        return f"{self.value:.3f}" + (f" ± {self.error:.3f}" if np.isfinite(self.error) else "")


def bootstrap_interval(values: Floats) -> tuple[float, float]:
    """The 95 % interval of the mean over ``RESAMPLES`` bootstrap samples."""
    chosen = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[chosen].mean(1), (0.025, 0.975))
    return float(low), float(high)


@dataclass(frozen=True)
class Faithfulness:
    """The scores of several methods on the same images."""

    scores: Mapping[str, Sequence[Score]]  # by method

    @property
    def images(self) -> int:
        """The number of images."""
        return max(map(len, self.scores.values()), default=0)

    def means(self, method: str) -> dict[str, Mean]:
        """The mean of each metric of a method; of deletion and insertion, the areas under the curves."""
        return {name: Mean.of(self._values(method, name)) for name in METRICS}

    def differences(self, method: str, other: str) -> dict[str, Mean]:
        """The mean of each metric of ``method`` minus that of ``other``, over the same images."""
        return {
            name: Mean.of(
                None if a is None or b is None else a - b
                for a, b in zip(self._values(method, name), self._values(other, name), strict=True)
            )
            for name in METRICS
        }

    def _values(self, method: str, metric: str) -> list[float | None]:
        values = [getattr(score, metric) for score in self.scores[method]]
        return [area(curve) for curve in values] if metric in TITLES else values

    def curve(self, method: str, which: str) -> Floats:
        """``(steps + 1,)``: the mean "deletion" or "insertion" curve of a method."""
        return np.mean([getattr(score, which) for score in self.scores[method]], axis=0)

    def rows(self) -> list[tuple[str, ...]]:
        """The table rows: the name and the means of each method (columns: :data:`HEADER`)."""
        return [(method, *map(str, self.means(method).values())) for method in self.scores]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            method: {
                name: {
                    "mean": mean.value,
                    "standard_error": mean.error,
                    "interval": list(mean.interval),
                    "images": mean.images,
                }
                for name, mean in self.means(method).items()
            }
            | {f"{which}_curve": self.curve(method, which).tolist() for which in TITLES}
            for method in self.scores
        }

    def plot(self) -> Figure:
        """A matplotlib figure of the mean deletion and insertion curves."""
        from matplotlib.figure import Figure  # pyplot would keep every figure alive and is not thread-safe

        fig = Figure(figsize=(10, 6.4), layout="constrained")
        axes = fig.subplots(1, 2, sharey=True)
        for ax, which in zip(axes, TITLES, strict=True):
            _plot_curves(ax, self, which)
        axes[0].set_ylabel(f"probability of the predicted class\nmean of {self.images} images")
        return fig


def gather(scores: Iterable[Mapping[str, Score]]) -> Faithfulness:
    """The faithfulness of each method from its scores on many images."""
    by_method: dict[str, list[Score]] = {}
    for image in scores:
        for method, score in image.items():
            by_method.setdefault(method, []).append(score)
    return Faithfulness(by_method)


METRICS = ("deletion", "insertion", "saco", "pointing", "auroc")
HEADER = ("method", "deletion ↓", "insertion ↑", "SaCo ↑", "pointing ↑", "foreground AUROC ↑")
TITLES = {
    "deletion": "Deletion: hottest pixels turn grey first\na faithful map falls early",
    "insertion": "Insertion: hottest pixels are restored first\na faithful map rises early",
}
# The colour-blind safe palette of Okabe and Ito; dashes and markers differ too.
STYLES: dict[str, dict[str, Any]] = {
    "pixels": dict(color="#0072B2", linestyle="-", linewidth=3.0),
    "path": dict(color="#0072B2", linestyle="-.", marker="*"),
    "shapley": dict(color="#0072B2", linestyle="--", marker="P"),
    "clusters": dict(color="#0072B2", linestyle=":", marker="X"),
    "grad-cam": dict(color="#D55E00", linestyle="--", marker="o"),
    "integrated gradients": dict(color="#009E73", linestyle="-.", marker="s"),
    "rollout": dict(color="#CC79A7", linestyle=(0, (5, 1, 1, 1, 1, 1)), marker="^"),
    "attention": dict(color="#56B4E9", linestyle="--", marker="<"),
    "relevance": dict(color="#E69F00", linestyle="-.", marker="v"),
    "rise": dict(color="#000000", linestyle="--", marker="D"),
    "random": dict(color="#595959", linestyle=":"),
}


def _plot_curves(ax: Axes, faithfulness: Faithfulness, which: str) -> None:
    for method in faithfulness.scores:
        curve = faithfulness.curve(method, which)
        mean = faithfulness.means(method)[which]
        share = np.linspace(0, 1, len(curve))
        style = dict(linewidth=1.8, markersize=5, markevery=max(len(curve) // 8, 1)) | STYLES[method]
        ax.plot(share, curve, label=f"{method} {mean.value:.3f}", **style)
    ax.set_title(TITLES[which], fontsize=11)
    ax.set_xlabel("share of the pixels")
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1.02)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    below = dict(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)  # curves cross all of the axes
    ax.legend(title="area under the curve", fontsize=9, title_fontsize=9, frameon=False, **below)


# The randomisation check (Adebayo et al., 2018).


def randomised(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """A copy of the model with the values of each parameter in random order."""
    copied, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copied.parameters():
            order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
            parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return copied


def randomisation_check(
    model: nn.Module, setting: Setting, images: Iterable[Tensor], *, methods: Sequence[str], seed: int = 0
) -> dict[str, Mean]:
    """The rank correlation of each method's maps before and after the weights are randomised.

    For the class predicted before. A map that hardly changes does not explain the model.
    """
    other = randomised(model, seed=seed)
    pairs = {name: (make_method(name, model, setting), make_method(name, other, setting)) for name in methods}
    found: dict[str, list[float]] = {name: [] for name in methods}
    for x in images:
        with eval_mode(model), torch.no_grad():
            target = int(class_probabilities(model, as_batch(model, x)).argmax())
        for name, (before, after) in pairs.items():
            found[name].append(rank_correlation(before(x, target), after(x, target)))
    return {name: Mean.of(values) for name, values in found.items()}
