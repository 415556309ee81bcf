"""K-medoids, plain and weighted, for a batch of token sets (Token Pooling Eq. 16–18)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from visualtokens.ops.checks import check_finite
from visualtokens.ops.hard import take
from visualtokens.ops.kmeans import Metric, check_cluster_arguments, origin, to_points, trivial_assignment
from visualtokens.ops.kmedoids_few import few_is_less, few_products, kmedoids_few
from visualtokens.ops.precision import own_precision
from visualtokens.ops.seeds import Init, distinct_indices, seed_indices


class KMedoids(NamedTuple):
    indices: Tensor  # (B, K): the token that stands for each cluster
    assignment: Tensor  # (B, N): the nearest medoid of each token


def kmedoids(
    x: Tensor,
    k: int,
    *,
    weights: Tensor | None = None,
    init: Init = None,
    iterations: int = 3,
    metric: Metric = "euclidean",
) -> KMedoids:
    """Cluster each set of ``x (B, N, C)`` around K of its own tokens.

    Eq. 16  a(i) = argmin_j ‖x_i − x_{n(j)}‖, the lowest j on ties
    Eq. 17  n(j) = argmin_{i: a(i)=j} Σ_{a(i')=j} w_i' ‖x_i − x_i'‖², the lowest i on ties

    The N×N distances are made once; an update adds their rows up by cluster, O(N²) additions. From the
    start "distinct" with few tokens to go, fewer distances will do, see :mod:`.kmedoids_few`.
    An empty cluster keeps its medoid. ``init`` as in :func:`~visualtokens.ops.seeds.seed_indices`;
    ``weights``, ``metric``, ``k >= N`` and ``k=0`` as in :func:`~visualtokens.ops.kmeans.kmeans`.
    The clustering has no gradient; tokens taken with :func:`~visualtokens.ops.take` have theirs.
    """
    check_finite("kmedoids", x=x, weights=weights, init=init)
    check_cluster_arguments(x, k, weights, iterations, metric)
    if k >= x.shape[1] or k == 0:
        return _trivial(x, k)
    points, weights = _detached(x, weights, metric)
    if _distinct(init) and few_is_less(x.shape[1], k, iterations):
        return _few(points, k, weights, iterations)
    distance = squared_distances(points)  # (B, N, N)
    indices = _search(distance, _start(init, x, k, weights, distance), weights, iterations)
    return KMedoids(indices, _nearest_medoid(distance, indices))


def medoids(
    x: Tensor, k: int, *, weights: Tensor | None = None, init: Init = None, iterations: int = 3
) -> Tensor:
    """The ``indices (B, K)`` of :func:`kmedoids` alone: it saves the last assignment."""
    check_finite("medoids", x=x, weights=weights, init=init)
    check_cluster_arguments(x, k, weights, iterations, "euclidean")
    if k >= x.shape[1] or k == 0:
        return _trivial(x, k).indices
    points, weights = _detached(x, weights, "euclidean")
    if _distinct(init) and few_is_less(x.shape[1], k, iterations):
        return _few(points, k, weights, iterations).indices
    distance = squared_distances(points)  # (B, N, N)
    return _search(distance, _start(init, x, k, weights, distance), weights, iterations)


def products(n: int, k: int, iterations: int, *, distinct: bool) -> int:
    """How many pairs of N tokens :func:`kmedoids` multiplies, from the start "distinct" or another."""
    few = distinct and few_is_less(n, k, iterations)
    return few_products(n, k, iterations) if few else n * n


def _distinct(init: Init) -> bool:
    return isinstance(init, str) and init == "distinct"


def _detached(x: Tensor, weights: Tensor | None, metric: Metric) -> tuple[Tensor, Tensor | None]:
    """Points and weights of one type, without gradient."""
    points = to_points(x.detach(), metric)
    return points, None if weights is None else weights.detach().to(points.dtype)


def _few(points: Tensor, k: int, weights: Tensor | None, iterations: int) -> KMedoids:
    with own_precision(points):
        return KMedoids(*kmedoids_few(points - origin(points), k, weights=weights, iterations=iterations))


def _trivial(x: Tensor, k: int) -> KMedoids:
    own = trivial_assignment(x, k)
    return KMedoids(own[:, : min(k, x.shape[1])], own)


def _start(init: Init, x: Tensor, k: int, weights: Tensor | None, distance: Tensor) -> Tensor:
    if _distinct(init):
        return distinct_indices(x, k, distance=distance)
    return seed_indices(init, x, k, weights=weights)


def _search(distance: Tensor, start: Tensor, weights: Tensor | None, iterations: int) -> Tensor:
    """Eq. 16 and 17 from the medoids ``start (B, K)`` on."""
    # PAPER: Eq. 17 prints no weight, but without it the step would not lower the objective of Eq. 13.
    weighted = distance if weights is None else distance * weights.unsqueeze(2)
    now = start
    for _ in range(iterations):
        assignment = _nearest_medoid(distance, now)  # (B, N)
        now = cheapest(_costs(weighted, assignment, now.shape[1]), assignment, now)
    return now


def squared_distances(points: Tensor) -> Tensor:
    """‖x_i − x_j‖² for all pairs, ``(B, N, N)``: symmetric to the bit, and exactly zero on the diagonal.

    Between equal points it is zero up to rounding.
    """
    with own_precision(points):
        points = points - origin(points)
        products = points @ points.mT  # (B, N, N)
        # A matrix product may round x_i·x_j and x_j·x_i differently; their sum has no order.
        products = products + products.mT
        square = products.diagonal(dim1=1, dim2=2) / 2  # (B, N)
        return (square.unsqueeze(1) + square.unsqueeze(2)).sub_(products).clamp_min_(0)


def _nearest_medoid(distance: Tensor, medoids: Tensor) -> Tensor:
    """Eq. 16 ``(B, N)``. Takes rows of the symmetric ``distance``, which is faster than columns."""
    return take(distance, medoids).min(1).indices


def _costs(weighted: Tensor, assignment: Tensor, k: int) -> Tensor:
    """Σ_{a(i')=a(i)} w_i' ‖x_i − x_i'‖² of each token i as the medoid of its cluster: ``(B, N)``."""
    b, n, _ = weighted.shape
    rows = (
        assignment
        if b == 1
        else assignment + torch.arange(0, b * k, k, device=assignment.device).unsqueeze(1)
    )
    sums = weighted.new_zeros(b * k, n).index_add_(0, rows.flatten(), weighted.flatten(0, 1))
    return sums.view(b, k, n).gather(1, assignment.unsqueeze(1)).squeeze(1)


def cheapest(cost: Tensor, assignment: Tensor, default: Tensor) -> Tensor:
    """The token of lowest ``cost (B, N)`` in each cluster, the lowest index on ties: ``(B, K)``.

    A cluster that is empty in ``assignment (B, N)`` takes its ``default (B, K)``.
    """
    n, k = cost.shape[1], default.shape[1]
    lowest = cost.new_zeros(cost.shape[0], k)  # (B, K); what an empty cluster holds is never looked at
    lowest = lowest.scatter_reduce(1, assignment, cost, "amin", include_self=False)
    index = torch.arange(n, device=cost.device)
    # The last index is no lower than any other, and still one of this image where all costs are NaN.
    candidates = torch.where(cost == lowest.gather(1, assignment), index, n - 1)  # (B, N)
    return default.scatter_reduce(1, assignment, candidates, "amin", include_self=False)
