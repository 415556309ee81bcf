"""K-means and k-medoids, plain and weighted, for a batch of token sets.

Both minimise Σ_i w_i ‖x_i − c_a(i)‖² (Token Pooling Eq. 13), in turns over the assignment a (Eq. 14, 16) and
the centres c: means in k-means (Eq. 15, VT Eq. 6), tokens in k-medoids (Eq. 17).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visualtokens.ops.distances import nearest_index, origin, squared_distances
from visualtokens.ops.groups import group_mean, group_sum, take
from visualtokens.ops.numerics import check_finite, upcast
from visualtokens.ops.seeds import Init, seed_centres, seed_indices

Metric = Literal["euclidean", "cosine"]


class KMeans(NamedTuple):
    centres: Tensor  # (B, K, C)
    assignment: Tensor  # (B, N): the nearest centre of each token


class KMedoids(NamedTuple):
    indices: Tensor  # (B, K): the tokens that are medoids
    assignment: Tensor  # (B, N): the nearest medoid of each token


def kmeans(
    x: Tensor,
    k: int,
    *,
    weights: Tensor | None = None,
    init: Init = None,
    iterations: int = 3,
    metric: Metric = "euclidean",
) -> KMeans:
    """Cluster each set of ``x (B, N, C)`` around K means: ``iterations`` updates, then a last assignment.

    Eq. 14  a(i) = argmin_j ‖x_i − c_j‖, the lowest j on ties
    Eq. 15  c_j  = Σ_{a(i)=j} w_i x_i / Σ_{a(i)=j} w_i;  a cluster of zero weight keeps its centre

    ``weights (B, N)`` must not be negative. ``init``: see :func:`~visualtokens.ops.seeds.seed_centres`.
    ``metric="cosine"`` clusters the directions; its centres are unit vectors. ``k >= N`` makes each token
    a centre (fewer than K); ``k=0`` makes none, and every assignment is -1.
    Gradients reach x, weights and given centres through the means, not through the assignment.
    """
    check_finite("kmeans", x=x, weights=weights, init=init)
    _check_arguments(x, k, weights, iterations, metric)
    points = _points(x, metric)  # (B, N, C)
    if k >= x.shape[1] or k == 0:
        return KMeans(points[:, :k].to(x.dtype), _trivial_assignment(x, k))
    centres = seed_centres(init, points, k, weights=weights)  # (B, K, C)
    if metric == "cosine":
        centres = F.normalize(centres, dim=2)
    shift = origin(points) if metric == "euclidean" else points.new_zeros(1)
    points, centres = points - shift, centres - shift
    for _ in range(iterations):
        centres = _update_means(points, weights, _nearest_centre(points, centres), centres, metric)
    return KMeans((centres + shift).to(x.dtype), _nearest_centre(points, centres))


@torch.no_grad()
def _nearest_centre(points: Tensor, centres: Tensor) -> Tensor:
    """Eq. 14, ``(B, N)``."""
    return nearest_index(points, centres)


def _update_means(
    points: Tensor, weights: Tensor | None, assignment: Tensor, centres: Tensor, metric: Metric
) -> Tensor:
    """Eq. 15, ``(B, K, C)``."""
    means, total = group_mean(points, assignment, centres.shape[1], weights=weights)
    empty = total.unsqueeze(2) == 0  # (B, K, 1)
    if metric == "euclidean":
        return torch.where(empty, centres, means)
    length = means.norm(dim=2, keepdim=True)
    # Directions that cancel leave only rounding errors: such a cluster keeps its centre as well.
    empty = empty | (length <= 64 * torch.finfo(length.dtype).eps)
    return torch.where(empty, centres, means / torch.where(empty, 1, length))


def kmedoids(
    x: Tensor,
    k: int,
    *,
    weights: Tensor | None = None,
    init: Init = None,
    iterations: int = 3,
    metric: Metric = "euclidean",
) -> KMedoids:
    """Cluster each set of ``x (B, N, C)`` around K of its tokens: ``iterations`` updates, a last assignment.

    Eq. 16  a(i) = argmin_j ‖x_i − x_{n(j)}‖, the lowest j on ties
    Eq. 17  n(j) = argmin_{i: a(i)=j} Σ_{a(i')=j} w_i' ‖x_i − x_i'‖², the lowest i on ties

    An empty cluster keeps its medoid. ``init``: see :func:`~visualtokens.ops.seeds.seed_indices`;
    ``weights``, ``metric``, ``k >= N`` and ``k=0`` are those of :func:`kmeans`.
    The clustering has no gradient; ``take(x, indices)`` has.
    """
    check_finite("kmedoids", x=x, weights=weights, init=init)
    _check_arguments(x, k, weights, iterations, metric)
    n = x.shape[1]
    if k >= n or k == 0:
        assignment = _trivial_assignment(x, k)
        return KMedoids(assignment[:, : min(k, n)], assignment)
    points = _points(x.detach(), metric)
    points = points - origin(points)  # (B, N, C)
    weights = None if weights is None else weights.detach().to(points.dtype)
    distance = squared_distances(points)  # (B, N, N)
    medoids = seed_indices(init, points, k, weights=weights, distance=distance)  # (B, K)
    # PAPER: Eq. 17 prints no weight, but without it the update would not lower the objective of Eq. 13.
    weighted = distance if weights is None else distance * weights.unsqueeze(2)
    for _ in range(iterations):
        assignment = _nearest_medoid(distance, medoids)
        medoids = cheapest(_costs(weighted, assignment, k), assignment, medoids)
    return KMedoids(medoids, _nearest_medoid(distance, medoids))


def _nearest_medoid(distance: Tensor, medoids: Tensor) -> Tensor:
    """Eq. 16, ``(B, N)``. Reads rows of the symmetric ``distance``, which is faster than columns."""
    return take(distance, medoids).min(1).indices


def _costs(weighted: Tensor, assignment: Tensor, k: int) -> Tensor:
    """Σ_{a(i')=a(i)} w_i' ‖x_i − x_i'‖², the cost of each token as the medoid of its cluster: ``(B, N)``."""
    sums = group_sum(weighted, assignment, k)  # (B, K, N)
    return sums.gather(1, assignment.unsqueeze(1)).squeeze(1)


def cheapest(cost: Tensor, assignment: Tensor, default: Tensor) -> Tensor:
    """Token of lowest ``cost (B, N)`` in each cluster, the lowest index on ties: ``(B, K)``.

    A cluster that is empty in ``assignment (B, N)`` gets its ``default (B, K)``.
    """
    n, k = cost.shape[1], default.shape[1]
    lowest = cost.new_zeros(cost.shape[0], k)  # (B, K); the value of an empty cluster is never read
    lowest = lowest.scatter_reduce(1, assignment, cost, "amin", include_self=False)
    index = torch.arange(n, device=cost.device)
    # n - 1 never wins against another candidate, and is a valid index even if all costs are NaN.
    candidates = torch.where(cost == lowest.gather(1, assignment), index, n - 1)  # (B, N)
    return default.scatter_reduce(1, assignment, candidates, "amin", include_self=False)


def _points(x: Tensor, metric: Metric) -> Tensor:
    """The points to cluster: at least float32, unit vectors for the cosine metric."""
    return F.normalize(upcast(x), dim=2) if metric == "cosine" else upcast(x)


def _trivial_assignment(x: Tensor, k: int) -> Tensor:
    """``(B, N)``: each token to itself, or -1 if K = 0."""
    b, n, _ = x.shape
    own = torch.arange(n, device=x.device) if k else torch.full((n,), -1, device=x.device)
    return own.expand(b, n)


def _check_arguments(x: Tensor, k: int, weights: Tensor | None, iterations: int, metric: str) -> None:
    if x.ndim != 3:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected (B, N, C): add a batch dimension")
    if not x.is_floating_point():
        raise ValueError(f"x is of type {x.dtype}; means need a floating type, such as x.float()")
    if k < 0:
        raise ValueError(f"k={k} is negative; give the number of clusters to keep")
    if iterations < 0:
        raise ValueError(f"iterations={iterations} is negative; 0 only assigns to the initial centres")
    if weights is not None and weights.shape != x.shape[:2]:
        raise ValueError(f"weights have shape {tuple(weights.shape)}; expected (B, N) = {tuple(x.shape[:2])}")
    if metric not in ("euclidean", "cosine"):
        raise ValueError(f"metric={metric!r} is neither 'euclidean' nor 'cosine'")
