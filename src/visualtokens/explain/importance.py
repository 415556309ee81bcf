"""PaCa Sec. 3.5: how much each cluster matters to a prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

# Two clusters whose drops in probability differ by less have "similar effects" (Sec. 3.5).
TIE = 1e-3
# A map whose spread is below this share of its maximum is constant: the rest is float32 rounding.
FLAT = 1e-6


def normalise(maps: Tensor) -> Tensor:
    """Sec. 3.5: H = (C - min C) / (max C - min C), each map of ``(K, h, w)`` by itself.

    A constant map singles out no region, so it becomes zeros and masks nothing.
    """
    maps = maps.float()
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)  # (K, 1, 1)
    flat = high - low <= FLAT * high.abs()
    return torch.where(flat, 0.0, (maps - low) / torch.where(flat, 1.0, high - low))  # (K, h, w)


def entropy(maps: Tensor) -> Tensor:
    """``(K,)``, in nats: how spread out each map of ``(K, h, w)`` is, read as shares of its sum.

    A map without any weight says nothing about where it lies and counts as evenly spread.
    """
    weights = maps.float().flatten(1)  # (K, N)
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, 1.0)
    return torch.special.entr(weights / weights.sum(1, keepdim=True)).sum(1)


def mask(x: Tensor, black: Tensor, heat: Tensor) -> Tensor:
    """``(K, 3, H, W)``: the input ``x (3, H, W)`` times 1 - H, for each H of ``heat (K, h, w)``.

    The picture is what Sec. 3.5 masks, not its normalised values: there, a masked pixel is black.
    With x = (picture - mean) / std, picture · (1 - H) becomes x · (1 - H) + black · H, where
    ``black (3, 1, 1)`` = -mean / std.
    """
    heat = F.interpolate(heat.unsqueeze(1), size=x.shape[1:], mode="bilinear", align_corners=False)
    return x * (1 - heat) + black * heat  # (K, 3, H, W)


def masked_probabilities(
    probability: Callable[[Tensor], Tensor], x: Tensor, black: Tensor, heat: Tensor, *, batch: int
) -> Tensor:
    """``(K,)``: what ``probability`` ((B, 3, H, W) → (B,)) says once each cluster is masked.

    At most ``batch`` masked pictures exist at a time, however many clusters there are.
    """
    out = heat.new_zeros(heat.shape[0])
    for start in range(0, heat.shape[0], batch):
        part = slice(start, start + batch)
        out[part] = probability(mask(x, black, heat[part]))
    return out


def rank(importance: Sequence[float], spread: Sequence[float], *, tie: float = TIE) -> list[int]:
    """The clusters, most important first; among near-equals the one of lower entropy comes first.

    Near-equal are those less than ``tie`` below the best cluster not yet ranked, so a long slope of
    small differences never counts as one tie.
    """
    left = sorted(range(len(importance)), key=lambda k: -importance[k])
    order: list[int] = []
    while left:
        best = importance[left[0]]
        equals = [k for k in left if k == left[0] or best - importance[k] < tie]
        order += sorted(equals, key=lambda k: (spread[k], k))
        left = left[len(equals) :]
    return order


def combine(maps: NDArray[np.floating], importance: NDArray[np.floating]) -> NDArray[np.floating]:
    """``(h, w)``, 0 to 1: the mean of the maps ``(K, h, w)``, each weighted by its importance ``(K,)``.

    A cluster without which the class would be more probable speaks against it and is left out. All zeros
    where nothing speaks for the class.
    """
    weights = np.maximum(importance, 0)  # (K,)
    total = np.tensordot(weights, maps, axes=1)  # (h, w)
    low, high = total.min(), total.max()
    return (total - low) / (high - low) if high > low else np.zeros_like(total)
