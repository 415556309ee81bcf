"""PaCa-ViT, Sec. 3.5: how much each cluster matters to the probability of a class.

Images are ``(3, H, W)``; cluster maps are ``(K, h, w)`` on the patch grid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.floating]

# Clusters whose drops in probability differ by less have "similar effects" (Sec. 3.5).
TIE = 1e-3
# A map with a smaller range, relative to its maximum, is constant up to float32 rounding.
CONSTANT = 1e-6


def normalise(maps: Tensor) -> Tensor:
    """Sec. 3.5: H = (C - min C) / (max C - min C), separately for each map of ``(K, h, w)``.

    A constant map singles out no region: it becomes zeros and masks nothing.
    """
    maps = maps.float()
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)  # (K, 1, 1)
    constant = high - low <= CONSTANT * high.abs()
    return torch.where(constant, 0.0, (maps - low) / torch.where(constant, 1.0, high - low))  # (K, h, w)


def mask(x: Tensor, black: Tensor, heat: Tensor) -> Tensor:
    """Sec. 3.5: ``(K, 3, H, W)``, the image ``x (3, H, W)`` times 1 - H, for each H of ``heat (K, h, w)``.

    The paper masks pixel values, so a masked pixel is black. With x = (pixels - mean) / std,
    pixels · (1 - H) becomes x · (1 - H) + black · H, where ``black (3, 1, 1)`` = -mean / std.
    """
    heat = F.interpolate(heat.unsqueeze(1), size=x.shape[1:], mode="bilinear", align_corners=False)
    return x * (1 - heat) + black * heat  # (K, 3, H, W)


def masked_probabilities(
    probability: Callable[[Tensor], Tensor], x: Tensor, black: Tensor, heat: Tensor, *, batch: int
) -> Tensor:
    """``(K,)``: the ``probability`` ((B, 3, H, W) → (B,)) of the image with each cluster masked.

    At most ``batch`` masked copies exist at a time.
    """
    out = heat.new_zeros(heat.shape[0])
    for start in range(0, heat.shape[0], batch):
        part = slice(start, start + batch)
        out[part] = probability(mask(x, black, heat[part]))
    return out


def entropy(maps: Tensor) -> Tensor:
    """``(K,)``: the entropy in nats of each map of ``(K, h, w)``, normalised to sum to 1.

    A map of zeros has no location and counts as uniform.
    """
    weights = maps.float().flatten(1)  # (K, N)
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, 1.0)
    return torch.special.entr(weights / weights.sum(1, keepdim=True)).sum(1)


def rank(importance: Sequence[float], entropies: Sequence[float], *, tie: float = TIE) -> list[int]:
    """Sec. 3.5: the clusters by decreasing importance; ties are broken by lower entropy.

    Tied are those less than ``tie`` below the best cluster not yet ranked, so a long series of small
    differences is never one tie.
    """
    remaining = sorted(range(len(importance)), key=lambda k: -importance[k])
    order: list[int] = []
    while remaining:
        best = importance[remaining[0]]
        tied = [k for k in remaining if k == remaining[0] or best - importance[k] < tie]
        order += sorted(tied, key=lambda k: (entropies[k], k))
        remaining = remaining[len(tied) :]
    return order


def combine(maps: Floats, importance: Floats) -> Floats:
    """``(h, w)`` from 0 to 1: the sum of the maps ``(K, h, w)`` weighted by their importance ``(K,)``.

    Clusters of negative importance count as zero. If no cluster supports the class, the map is zero.
    """
    return scale(np.tensordot(np.maximum(importance, 0), maps, axes=1))  # (h, w)


def scale(heat: Floats) -> Floats:
    """``(h, w)`` from 0 to 1; zeros for a constant map."""
    low, high = heat.min(), heat.max()
    return (heat - low) / (high - low) if high > low else np.zeros_like(heat)
