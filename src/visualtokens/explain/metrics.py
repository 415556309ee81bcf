"""Metrics of one heat map: deletion, insertion, SaCo, pointing game, foreground AUROC, rank correlation."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from visualtokens.explain.hiding import gaussian_blur
from visualtokens.explain.importance import Floats

Mask = NDArray[np.integer]  # (H, W): 1 foreground, 0 background, -1 undecided
Probability = Callable[[Tensor], Tensor]  # (B, 3, H, W) → (B,)
Ends = tuple[float, float]  # the first and the last probability of a curve

# The blur of insertion, as a share of the longer side: 20 pixels at 224. RISE has 5, cut off after 5 pixels,
# which hides too little: the mean probability of 24 photos, 0.86, is 0.42 with it and 0.003 here (ViT-B/16).
BLUR_SIGMA = 20 / 224


def deletion(
    probability: Probability, x: Tensor, heat: Floats, *, steps: int, batch: int, ends: Ends | None = None
) -> Floats:
    """``(steps + 1,)``: the probability while pixels turn grey, hottest first (RISE, Sec. 4.3).

    ``x (3, H, W)`` is normalised, so 0 is the mean colour. With a faithful map the curve falls early.
    ``ends`` are the first and the last probability, if known: they do not depend on the map.
    """
    return _curve(probability, x, torch.zeros_like(x), heat, steps=steps, batch=batch, ends=ends)


def insertion(
    probability: Probability, x: Tensor, heat: Floats, *, steps: int, batch: int, ends: Ends | None = None
) -> Floats:
    """``(steps + 1,)``: the probability while a blurred image gets its pixels back, hottest first."""
    return _curve(probability, blurred(x), x, heat, steps=steps, batch=batch, ends=ends)


def curve_ends(probability: Probability, x: Tensor) -> tuple[Ends, Ends]:
    """The ends of :func:`deletion` and of :func:`insertion` for every map of ``x (3, H, W)``."""
    images = torch.stack((x, torch.zeros_like(x), blurred(x)))
    whole, grey, blur = probability(images).float().cpu().tolist()
    return (whole, grey), (blur, whole)


def area(curve: Floats) -> float:
    """The area under a curve over the share of changed pixels, from 0 to 1."""
    return float(np.trapezoid(curve, dx=1 / (len(curve) - 1)))


def blurred(x: Tensor) -> Tensor:
    """``x (3, H, W)`` with a Gaussian blur that removes the details."""
    sigma = max(x.shape[1:]) * BLUR_SIGMA
    return gaussian_blur(x, sigma=sigma, radius=math.ceil(3 * sigma))


def _curve(
    probability: Probability,
    start: Tensor,
    end: Tensor,
    heat: Floats,
    *,
    steps: int,
    batch: int,
    ends: Ends | None,
) -> Floats:
    """The probability on the way from one image to the other, pixel by pixel in the order of the heat."""
    step_of = rank_groups(heat, steps).to(start.device) + 1  # (H, W)
    out = torch.empty(steps + 1)
    if ends is not None:
        out[0], out[-1] = ends
    unknown = torch.arange(steps + 1) if ends is None else torch.arange(1, steps)
    for first in range(0, len(unknown), batch):
        step = unknown[first : first + batch]  # (B,)
        changed = step_of <= step.view(-1, 1, 1, 1).to(start.device)  # (B, 1, H, W)
        out[step] = probability(torch.where(changed, end, start)).float().cpu()
    return out.numpy()


def rank_groups(heat: Floats, groups: int) -> Tensor:
    """``(H, W)``: the group of each pixel among equally large ones, 0 for the hottest.

    Pixels of equal heat are ordered by a fixed random permutation; reading order would be a bias.
    """
    flat = np.asarray(heat, dtype=np.float64).ravel()
    tie_break = np.random.default_rng(0).permutation(flat.size)
    order = np.lexsort((tie_break, -flat))  # (N,): hottest first
    rank = np.empty(flat.size, dtype=np.int64)
    rank[order] = np.arange(flat.size)
    return torch.from_numpy(rank * groups // flat.size).view(heat.shape)


def saco(probability: Probability, x: Tensor, heat: Floats, *, groups: int, batch: int) -> float:
    """The salience-guided faithfulness coefficient (Wu et al., 2024), from -1 to 1.

    The pixels are divided into equal ``groups`` by their heat, and each group in turn is replaced by the mean
    colour. Of every two groups, the hotter one should lower the probability at least as much. The coefficient
    is the share of the pairs for which it does minus that of the others, weighted by the difference of their
    total heat.
    """
    group_of = rank_groups(heat, groups).to(x.device)  # (H, W)
    after = torch.empty(groups)
    for first in range(0, groups, batch):
        group = torch.arange(first, min(first + batch, groups), device=x.device)
        images = torch.where(group_of == group.view(-1, 1, 1, 1), torch.zeros((), device=x.device), x)
        after[first : first + len(group)] = probability(images).float().cpu()
    total = np.bincount(group_of.cpu().numpy().ravel(), np.asarray(heat, dtype=np.float64).ravel())
    weight = np.triu(total[:, None] - total[None])  # (groups, groups), of the pairs i < j
    agrees = after.numpy()[:, None] <= after.numpy()[None]
    scale = weight.sum()
    return float(np.where(agrees, weight, -weight).sum() / scale) if scale > 0 else 0.0


def rank_correlation(first: Floats, second: Floats) -> float:
    """Spearman's correlation of two heat maps; 0 if one of them is constant."""
    a, b = _ranks(first), _ranks(second)
    a, b = a - a.mean(), b - b.mean()
    norm = math.sqrt(float((a**2).sum() * (b**2).sum()))
    return float((a * b).sum() / norm) if norm > 0 else 0.0


def _ranks(values: Floats) -> Floats:
    """The rank of each value, from 1; equal values share their mean rank."""
    _, inverse, ties = np.unique(values, return_inverse=True, return_counts=True)
    return (ties.cumsum() - (ties - 1) / 2)[inverse].ravel()


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
    ranks = _ranks(heat[decided])
    return float((ranks[foreground].mean() - (count + 1) / 2) / (foreground.size - count))
