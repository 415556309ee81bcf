"""Squared Euclidean distances between tokens, by matrix products of centred points.

‖x − y‖² = ‖x‖² + ‖y‖² − 2 x·y loses digits if the points share a large offset. Subtract :func:`origin` first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visualtokens.ops.numerics import no_autocast


def origin(points: Tensor) -> Tensor:
    """A point amid ``points (B, N, C)`` to subtract before distances are computed: ``(B, 1, C)``, detached.

    The channel-wise median of three tokens. A single outlier does not move it, unlike the mean, and
    differences of integers stay exact, and with them ties.
    """
    points, n = points.detach(), points.shape[1]
    first, middle, last = points[:, :1], points[:, n // 2 : n // 2 + 1], points[:, n - 1 :]
    return middle.clamp(torch.minimum(first, last), torch.maximum(first, last))


def squared_distances(points: Tensor) -> Tensor:
    """‖x_i − x_j‖² of all pairs of centred ``points (B, N, C)``: ``(B, N, N)``.

    Symmetric to the bit, zero on the diagonal, and never negative.
    """
    with no_autocast(points):
        products = points @ points.mT  # (B, N, N)
    # A kernel may round x_i·x_j and x_j·x_i differently; their sum does not depend on the order.
    products = products + products.mT
    square = products.diagonal(dim1=1, dim2=2) / 2  # (B, N)
    return (square.unsqueeze(1) + square.unsqueeze(2)).sub_(products).clamp_min_(0)


def nearest_distance(points: Tensor, others: Tensor) -> Tensor:
    """min_j ‖x_i − y_j‖², ``(B, N)``; ``points (B, N, C)`` and ``others (B, M, C)`` are centred."""
    return _relative_distances(points, others).amin(2) + points.square().sum(2)


def nearest_index(points: Tensor, others: Tensor) -> Tensor:
    """argmin_j ‖x_i − y_j‖, the lowest j on ties, ``(B, N)``."""
    return _relative_distances(points, others).min(2).indices


def _relative_distances(points: Tensor, others: Tensor) -> Tensor:
    """‖x_i − y_j‖² − ‖x_i‖², ``(B, N, M)``: the term that is the same for all j is left out."""
    with no_autocast(points):
        square = others.square().sum(2).unsqueeze(1)  # (B, 1, M)
        return torch.baddbmm(square, points, others.mT, alpha=-2)
