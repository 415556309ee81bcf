"""How faithful our maps are, measured beside those of other methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.explain.baselines import METHODS, Saliency, Setting, make_method
from visualtokens.explain.explainer import check_positive, evaluating, input_like, probabilities
from visualtokens.explain.importance import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


# How faithful a heat map is: to the model (deletion, insertion) and to what is in the picture (masks).

Probability = Callable[[Tensor], Tensor]  # (B, 3, H, W) → (B,)

# Petsiuk et al. 2018 blur images of 224 pixels with a kernel of 11 and σ = 5.
BLUR_KERNEL, BLUR_SIGMA = 11 / 224, 5 / 224


def deletion(probability: Probability, x: Tensor, heat: Floats, *, steps: int, batch: int) -> Floats:
    """``(steps + 1,)``: the probability while the pixels go grey, the hottest first (RISE, Sec. 4.3).

    ``x (3, H, W)`` is normalised, so grey, the mean colour, is 0. A faithful map makes it fall early.
    """
    return _curve(probability, x, torch.zeros_like(x), heat, steps=steps, batch=batch)


def insertion(probability: Probability, x: Tensor, heat: Floats, *, steps: int, batch: int) -> Floats:
    """``(steps + 1,)``: the probability while a blurred image gets its pixels back, the hottest first."""
    return _curve(probability, blurred(x), x, heat, steps=steps, batch=batch)


def area(curve: Floats) -> float:
    """The area under a curve over the share of pixels, from 0 to 1."""
    return float(np.trapezoid(curve, dx=1 / (len(curve) - 1)))


def blurred(x: Tensor) -> Tensor:
    """``x (3, H, W)`` without its details."""
    from torchvision.transforms.v2.functional import gaussian_blur

    side = max(x.shape[1:])
    reach = min(math.ceil(side * BLUR_KERNEL / 2), *(s - 1 for s in x.shape[1:]))
    return gaussian_blur(x, [2 * reach + 1, 2 * reach + 1], [side * BLUR_SIGMA] * 2)


def _curve(
    probability: Probability, start: Tensor, end: Tensor, heat: Floats, *, steps: int, batch: int
) -> Floats:
    """From one image to the other, pixel by pixel in the order of the heat."""
    turn = _turns(heat, steps).to(start.device)  # (H, W)
    out = torch.empty(steps + 1)
    for first in range(0, steps + 1, batch):
        now = torch.arange(first, min(first + batch, steps + 1), device=start.device)  # (B,)
        changed = turn <= now.view(-1, 1, 1, 1)  # (B, 1, H, W)
        out[first : first + len(now)] = probability(torch.where(changed, end, start)).float().cpu()
    return out.numpy()


def _turns(heat: Floats, steps: int) -> Tensor:
    """``(H, W)``: the step, from 1, at which each pixel changes.

    Equal pixels come in an order drawn by lot, always the same: from left to right would be a bias.
    """
    flat = np.asarray(heat, dtype=np.float64).ravel()
    lot = np.random.default_rng(0).permutation(flat.size)
    order = np.lexsort((lot, -flat))  # (N,): the hottest first
    rank = np.empty(flat.size, dtype=np.int64)
    rank[order] = np.arange(flat.size)
    return torch.from_numpy(rank * steps // flat.size + 1).view(heat.shape)


def pointing(heat: Floats, mask: NDArray[np.integer]) -> float:
    """The pointing game (Zhang et al. 2016): whether the hottest place is foreground; of equal ones, a share.

    ``mask`` is 1 for foreground, 0 for background, -1 for undecided, which nobody is asked about.
    """
    decided = mask >= 0
    hottest = decided & (heat == heat[decided].max(initial=-np.inf))
    return float(mask[hottest].mean()) if hottest.any() else math.nan


def foreground_auroc(heat: Floats, mask: NDArray[np.integer]) -> float:
    """How often a place of the foreground is hotter than one of the background; NaN if one is missing."""
    from torchmetrics.functional.classification import binary_auroc

    decided = mask >= 0
    labels = torch.from_numpy(mask[decided].astype(np.int64))
    if not 0 < int(labels.sum()) < len(labels):
        return math.nan
    # Outside of 0 to 1 torchmetrics takes values for logits and squashes them, which merges neighbours.
    ranks = np.unique(heat[decided], return_inverse=True)[1].reshape(-1)
    return float(binary_auroc(torch.from_numpy(ranks / max(ranks.max(), 1)), labels))


# The curves of deletion and insertion, told apart by dashes and markers as well as by colour.

# Okabe and Ito's colours, which colour-blind eyes tell apart; ours is the only thick solid line.
STYLES: dict[str, dict[str, Any]] = {
    "clusters": dict(color="#0072B2", linestyle="-", linewidth=3.0),
    "grad-cam": dict(color="#D55E00", linestyle="--", marker="o"),
    "integrated gradients": dict(color="#009E73", linestyle="-.", marker="s"),
    "rollout": dict(color="#CC79A7", linestyle=(0, (5, 1, 1, 1, 1, 1)), marker="^"),
    "random": dict(color="#595959", linestyle=":"),
}
TITLES = {
    "deletion": "Deletion: the hottest pixels go grey first\nfalling early is faithful",
    "insertion": "Insertion: the hottest pixels come back first\nrising early is faithful",
}


def figure(faithfulness: Faithfulness) -> Figure:
    from matplotlib.figure import Figure  # not pyplot, which keeps figures alive and is not for threads

    fig = Figure(figsize=(10, 4.6), layout="constrained")
    axes = fig.subplots(1, 2, sharey=True)
    for ax, which in zip(axes, TITLES, strict=True):
        _curves(ax, faithfulness, which)
    axes[0].set_ylabel(f"probability of the predicted class\nmean of {faithfulness.images} images")
    return fig


def _curves(ax: Axes, faithfulness: Faithfulness, which: str) -> None:
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
    ax.legend(title="area under the curve", fontsize=9, title_fontsize=9, frameon=False)
