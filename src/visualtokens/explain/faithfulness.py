"""How faithful heat maps are: deletion, insertion, pointing game and foreground AUROC of several methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from visualtokens.data import BadImage, Preprocess
from visualtokens.data.decode import read_mask
from visualtokens.errors import UserError
from visualtokens.explain.baselines import METHODS, Saliency, Setting, make_method
from visualtokens.explain.importance import Floats
from visualtokens.explain.inputs import as_batch, check_positive, class_probabilities, input_like
from visualtokens.modes import eval_mode

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Mask = NDArray[np.integer]  # (H, W): 1 foreground, 0 background, -1 undecided
Probability = Callable[[Tensor], Tensor]  # (B, 3, H, W) → (B,)

STEPS = 24
BLUR_KERNEL, BLUR_SIGMA = (
    11 / 224,
    5 / 224,
)  # of the longer side; Petsiuk et al. (2018): 11 and 5 at 224 pixels


# The metrics of one heat map.


def deletion(probability: Probability, x: Tensor, heat: Floats, *, steps: int, batch: int) -> Floats:
    """``(steps + 1,)``: the probability while pixels turn grey, hottest first (RISE, Sec. 4.3).

    ``x (3, H, W)`` is normalised, so 0 is the mean colour. With a faithful map the curve falls early.
    """
    return _curve(probability, x, torch.zeros_like(x), heat, steps=steps, batch=batch)


def insertion(probability: Probability, x: Tensor, heat: Floats, *, steps: int, batch: int) -> Floats:
    """``(steps + 1,)``: the probability while a blurred image gets its pixels back, hottest first."""
    return _curve(probability, blurred(x), x, heat, steps=steps, batch=batch)


def area(curve: Floats) -> float:
    """The area under a curve over the share of changed pixels, from 0 to 1."""
    return float(np.trapezoid(curve, dx=1 / (len(curve) - 1)))


def blurred(x: Tensor) -> Tensor:
    """``x (3, H, W)`` with a Gaussian blur that removes the details."""
    from torchvision.transforms.v2.functional import gaussian_blur

    side = max(x.shape[1:])
    radius = min(math.ceil(side * BLUR_KERNEL / 2), *(s - 1 for s in x.shape[1:]))
    return gaussian_blur(x, [2 * radius + 1, 2 * radius + 1], [side * BLUR_SIGMA] * 2)


def _curve(
    probability: Probability, start: Tensor, end: Tensor, heat: Floats, *, steps: int, batch: int
) -> Floats:
    """The probability on the way from one image to the other, pixel by pixel in the order of the heat."""
    step_of = _change_steps(heat, steps).to(start.device)  # (H, W)
    out = torch.empty(steps + 1)
    for first in range(0, steps + 1, batch):
        step = torch.arange(first, min(first + batch, steps + 1), device=start.device)  # (B,)
        changed = step_of <= step.view(-1, 1, 1, 1)  # (B, 1, H, W)
        out[first : first + len(step)] = probability(torch.where(changed, end, start)).float().cpu()
    return out.numpy()


def _change_steps(heat: Floats, steps: int) -> Tensor:
    """``(H, W)``: the step, from 1, at which each pixel changes.

    Pixels of equal heat are ordered by a fixed random permutation; reading order would be a bias.
    """
    flat = np.asarray(heat, dtype=np.float64).ravel()
    tie_break = np.random.default_rng(0).permutation(flat.size)
    order = np.lexsort((tie_break, -flat))  # (N,): hottest first
    rank = np.empty(flat.size, dtype=np.int64)
    rank[order] = np.arange(flat.size)
    return torch.from_numpy(rank * steps // flat.size + 1).view(heat.shape)


def pointing(heat: Floats, mask: Mask) -> float:
    """The pointing game (Zhang et al., 2016): 1 if the hottest pixel is foreground, else 0.

    Undecided pixels are left out. If several pixels are hottest, the share of them that is foreground.
    """
    decided = mask >= 0
    hottest = decided & (heat == heat[decided].max(initial=-np.inf))
    return float(mask[hottest].mean()) if hottest.any() else math.nan


def foreground_auroc(heat: Floats, mask: Mask) -> float:
    """The probability that a foreground pixel is hotter than a background pixel; NaN without one of either.

    From the mean rank of the foreground (Mann-Whitney U); pixels of equal heat share their mean rank.
    """
    decided = mask >= 0
    foreground = mask[decided] == 1
    count = int(foreground.sum())
    if not 0 < count < foreground.size:
        return math.nan
    _, inverse, ties = np.unique(heat[decided], return_inverse=True, return_counts=True)
    ranks = (ties.cumsum() - (ties - 1) / 2)[inverse]  # from 1
    return float((ranks[foreground].mean() - (count + 1) / 2) / (foreground.size - count))


# Methods on images.


@dataclass(frozen=True)
class Score:
    """The metrics of one method on one image."""

    deletion: Floats  # (steps + 1,)
    insertion: Floats  # (steps + 1,)
    pointing: float | None = None  # None without a mask
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
        """The score that :meth:`to_dict` wrote."""
        return cls(
            np.asarray(values["deletion"], dtype=np.float64),
            np.asarray(values["insertion"], dtype=np.float64),
            values["pointing"],
            values["auroc"],
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
    ) -> None:
        check_positive(steps=steps, batch=setting.batch)
        if not methods:
            raise UserError(f"no methods to evaluate; give some of {', '.join(METHODS)}")
        self.model = model
        self.setting = setting
        self.steps = steps
        self.methods: dict[str, Saliency] = {name: make_method(name, model, setting) for name in methods}

    def evaluate(self, x: Tensor, mask: Mask | None = None) -> dict[str, Score]:
        """The score of each method for the class predicted on ``x (3, H, W)``.

        ``mask (H, W)`` is the foreground: 1, 0, or -1 where undecided.
        """
        like = input_like(self.model)
        x = x.to(like.device)
        with eval_mode(self.model):
            with torch.no_grad():
                target = int(class_probabilities(self.model, as_batch(self.model, x)).argmax())

            def probability(images: Tensor) -> Tensor:
                return class_probabilities(self.model, images.to(like.dtype))[:, target]

            return {
                name: self._score(probability, x, saliency(x, target), mask)
                for name, saliency in self.methods.items()
            }

    def _score(self, probability: Probability, x: Tensor, heat: Floats, mask: Mask | None) -> Score:
        steps, batch = self.steps, self.setting.batch
        with torch.no_grad():
            return Score(
                deletion(probability, x, heat, steps=steps, batch=batch),
                insertion(probability, x, heat, steps=steps, batch=batch),
                None if mask is None else pointing(heat, mask),
                None if mask is None else foreground_auroc(heat, mask),
            )


@dataclass(frozen=True)
class Mean:
    """A mean over images with its standard error; NaN without values."""

    value: float
    error: float
    images: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Mean:
        """The mean of the finite values."""
        finite = np.array([v for v in values if v is not None and np.isfinite(v)])
        if not len(finite):
            return cls(np.nan, np.nan, 0)
        error = finite.std(ddof=1) / np.sqrt(len(finite)) if len(finite) > 1 else np.nan
        return cls(float(finite.mean()), float(error), len(finite))

    def __str__(self) -> str:
        if not self.images:
            return "–"
        return f"{self.value:.3f}" + (f" ± {self.error:.3f}" if np.isfinite(self.error) else "")


@dataclass(frozen=True)
class Faithfulness:
    """The scores of several methods on the same images."""

    scores: Mapping[str, Sequence[Score]]  # by method

    @property
    def images(self) -> int:
        """The number of images."""
        return max(map(len, self.scores.values()), default=0)

    def means(self, method: str) -> dict[str, Mean]:
        """The mean areas under the deletion and insertion curves, pointing hits and AUROC of a method."""
        scores = self.scores[method]
        return {
            "deletion": Mean.of(area(s.deletion) for s in scores),
            "insertion": Mean.of(area(s.insertion) for s in scores),
            "pointing": Mean.of(s.pointing for s in scores),
            "auroc": Mean.of(s.auroc for s in scores),
        }

    def curve(self, method: str, which: str) -> Floats:
        """``(steps + 1,)``: the mean "deletion" or "insertion" curve of a method."""
        return np.mean([getattr(score, which) for score in self.scores[method]], axis=0)

    def rows(self) -> list[tuple[str, ...]]:
        """The table rows: the name and the four means of each method (columns: :data:`HEADER`)."""
        return [(method, *map(str, self.means(method).values())) for method in self.scores]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            method: {
                name: {"mean": mean.value, "standard_error": mean.error, "images": mean.images}
                for name, mean in self.means(method).items()
            }
            | {f"{which}_curve": self.curve(method, which).tolist() for which in TITLES}
            for method in self.scores
        }

    def plot(self) -> Figure:
        """A matplotlib figure of the mean deletion and insertion curves."""
        from matplotlib.figure import Figure  # pyplot would keep every figure alive and is not thread-safe

        fig = Figure(figsize=(10, 4.6), layout="constrained")
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


HEADER = ("method", "deletion ↓", "insertion ↑", "pointing ↑", "foreground AUROC ↑")
TITLES = {
    "deletion": "Deletion: hottest pixels turn grey first\na faithful map falls early",
    "insertion": "Insertion: hottest pixels are restored first\na faithful map rises early",
}
# The colour-blind safe palette of Okabe and Ito; dashes and markers differ too.
STYLES: dict[str, dict[str, Any]] = {
    "clusters": dict(color="#0072B2", linestyle="-", linewidth=3.0),
    "grad-cam": dict(color="#D55E00", linestyle="--", marker="o"),
    "integrated gradients": dict(color="#009E73", linestyle="-.", marker="s"),
    "rollout": dict(color="#CC79A7", linestyle=(0, (5, 1, 1, 1, 1, 1)), marker="^"),
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
    ax.legend(title="area under the curve", fontsize=9, title_fontsize=9, frameon=False)


# Foreground masks: the trimaps of Oxford-IIIT Pets (1, 2, 3), or white on black.

FOREGROUND, BACKGROUND, UNDECIDED = (1, 255), (2, 0), (3,)
SUFFIXES = (".png", ".bmp", ".gif", ".tif", ".tiff")


def read_foreground(path: str | Path, preprocess: Preprocess, size: tuple[int, int]) -> NDArray[np.int8]:
    """``(H, W)``: the mask as the model sees the image of ``size`` (width, height).

    1 is foreground, 0 background, -1 undecided.
    """
    numbers = read_mask(path, colours="grey")
    height, width = numbers.shape
    if (width, height) != size:
        raise BadImage(str(path), f"a mask of {width}×{height} for an image of {size[0]}×{size[1]}")
    mask = Image.fromarray(numbers if numbers.dtype == np.uint8 else numbers.astype(np.int32))
    height, width = preprocess.size
    box = preprocess.crop_box(*size)
    values = np.asarray(mask.resize((width, height), Image.Resampling.NEAREST, box=box))  # (H, W)
    invalid = set(np.unique(values).tolist()) - {*FOREGROUND, *BACKGROUND, *UNDECIDED}
    if invalid:
        raise BadImage(
            str(path), f"a mask with the value {min(invalid)}; expected 1, 2, 3 (trimap) or 0, 255"
        )
    out = np.full(values.shape, -1, dtype=np.int8)
    out[np.isin(values, FOREGROUND)] = 1
    out[np.isin(values, BACKGROUND)] = 0
    return out


def find_mask(image: str, masks: str | Path) -> Path:
    """The mask of an image: the file with the same stem, with or without the class and split folders.

    For ``…/val/beagle/beagle_3.jpg`` that is ``masks/val/beagle/beagle_3.png``, ``masks/beagle/beagle_3.png``
    or ``masks/beagle_3.png``.
    """
    parts = Path(image).parts
    for depth in (3, 2, 1):
        stem = Path(masks, *parts[-depth:-1], Path(parts[-1]).stem)
        for suffix in SUFFIXES:
            # with_suffix would cut a name such as photo.1
            if (path := stem.with_name(stem.name + suffix)).exists():
                return path
    raise UserError(f"{image} has no mask in {masks}; expected a file such as {Path(image).stem}.png there")
