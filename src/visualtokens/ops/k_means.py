"""K-means, plain and weighted, for a batch of token sets (Token Pooling Eq. 13–15, VT Eq. 6)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visualtokens.ops.checks import check_finite, own_precision
from visualtokens.ops.seeds import Init, seed_centres

Metric = Literal["euclidean", "cosine"]


class KMeans(NamedTuple):
    centres: Tensor  # (B, K, C)
    assignment: Tensor  # (B, N): the nearest centre of each token


def kmeans(
    x: Tensor,
    k: int,
    *,
    weights: Tensor | None = None,
    init: Init = None,
    iterations: int = 3,
    metric: Metric = "euclidean",
) -> KMeans:
    """Cluster each set of ``x (B, N, C)`` around K centres: ``iterations`` updates, then a last assignment.

    Eq. 14  a(i) = argmin_j ‖x_i − c_j‖, the lowest j on ties
    Eq. 15  c_j  = Σ_{a(i)=j} w_i x_i / Σ_{a(i)=j} w_i;  a cluster without weight keeps its centre

    ``weights (B, N)`` must not be negative. ``init`` as in :func:`~visualtokens.ops.seeds.seed_centres`.
    ``metric="cosine"`` clusters the directions; its centres are unit vectors. ``k >= N`` gives every
    token its own centre (so fewer than K); ``k=0`` gives none, and every assignment is -1.
    Gradients reach x, weights and given centres through the means, not through the assignment.
    """
    check_finite("kmeans", x=x, weights=weights, init=init)
    check_cluster_arguments(x, k, weights, iterations, metric)
    points = to_points(x, metric)  # (B, N, C)
    if k >= x.shape[1] or k == 0:
        return KMeans(points[:, :k].to(x.dtype), trivial_assignment(x, k))
    shift = origin(points) if metric == "euclidean" else points.new_zeros(1)  # (B, 1, C)
    centres = seed_centres(init, points, k, weights=weights)  # (B, K, C)
    if metric == "cosine":
        centres = F.normalize(centres, dim=2)
    points, centres = points - shift, centres - shift
    w = points.new_ones(points.shape[:2]) if weights is None else weights.to(points.dtype)  # (B, N)
    weighted = points if weights is None else points * w.unsqueeze(2)
    for _ in range(iterations):
        centres = _update(points, weighted, w, centres, metric)
    return KMeans((centres + shift).to(x.dtype), nearest(points, centres))


def _update(points: Tensor, weighted: Tensor, weights: Tensor, centres: Tensor, metric: Metric) -> Tensor:
    """Eq. 14, then Eq. 15: the weighted means of the points nearest to each centre, ``(B, K, C)``."""
    b, k, _ = centres.shape
    assignment = nearest(points, centres)  # (B, N)
    total = weights.new_zeros(b, k).scatter_add(1, assignment, weights).unsqueeze(2)  # (B, K, 1)
    empty = total == 0
    rows = assignment + k * torch.arange(b, device=points.device).unsqueeze(1)
    # The sum of a cluster without weight starts from its centre, and nothing is added to it.
    sums = (centres * empty).flatten(0, 1).index_add_(0, rows.flatten(), weighted.flatten(0, 1))
    sums = sums.unflatten(0, (b, k))
    if metric == "euclidean":
        return sums / torch.where(empty, 1, total)
    length = sums.norm(dim=2, keepdim=True)
    # Directions that cancel leave nothing but rounding: such a cluster keeps its centre, too.
    cancelled = length <= 64 * torch.finfo(length.dtype).eps * total
    return torch.where(cancelled, centres, sums / torch.where(length > 0, length, 1))


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """argmin_j ‖x_i − c_j‖² ``(B, N)``, as argmin_j (‖c_j‖² − 2 x_i·c_j): ‖x_i‖² is the same for all j."""
    with torch.no_grad(), own_precision(points):
        square = centres.square().sum(2).unsqueeze(1)  # (B, 1, K)
        return torch.baddbmm(square, points, centres.mT, alpha=-2).min(2).indices


def origin(points: Tensor) -> Tensor:
    """``(B, 1, C)``: from where distances are measured, so that a large common part costs no digits.

    The median of three tokens, channel by channel: it lies among them even where one is far off, and unlike
    a mean it leaves differences of whole numbers, and with them ties, exact.
    """
    points, n = points.detach(), points.shape[1]
    first, middle, last = points[:, :1], points[:, n // 2 : n // 2 + 1], points[:, n - 1 :]
    return middle.clamp(torch.minimum(first, last), torch.maximum(first, last))


def to_points(x: Tensor, metric: Metric) -> Tensor:
    """What is clustered: at least float32, and unit vectors where only the direction counts."""
    points = x if x.dtype == torch.float64 else x.float()
    return F.normalize(points, dim=2) if metric == "cosine" else points


def trivial_assignment(x: Tensor, k: int) -> Tensor:
    """``(B, N)``: each token to itself, or to nobody where nothing is kept."""
    b, n, _ = x.shape
    own = torch.arange(n, device=x.device) if k else torch.full((n,), -1, device=x.device)
    return own.expand(b, n)


def check_cluster_arguments(x: Tensor, k: int, weights: Tensor | None, iterations: int, metric: str) -> None:
    if x.ndim != 3:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected (B, N, C): add a batch dimension")
    if not x.is_floating_point():
        raise ValueError(f"x is of type {x.dtype}; means need a floating type, such as x.float()")
    if k < 0:
        raise ValueError(f"k={k} is negative; give the number of clusters to keep")
    if iterations < 0:
        raise ValueError(f"iterations={iterations} is negative; 0 only assigns to the first centres")
    if weights is not None and weights.shape != x.shape[:2]:
        raise ValueError(f"weights have shape {tuple(weights.shape)}; expected (B, N) = {tuple(x.shape[:2])}")
    if metric not in ("euclidean", "cosine"):
        raise ValueError(f"metric={metric!r} is neither 'euclidean' nor 'cosine'")
