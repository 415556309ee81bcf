"""How faithful a heat map is: to the model (deletion, insertion) and to what is in the picture (masks)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from visualtokens.explain.geometry import Floats

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
