"""K-medoids, plain and weighted, for a batch of token sets (Token Pooling Eq. 16–18)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from visualtokens.ops.checks import check_finite
from visualtokens.ops.hard import group_sum, take
from visualtokens.ops.kmeans import Metric, check_cluster_arguments, origin, to_points, trivial_assignment
from visualtokens.ops.seeds import Init, seed_indices


class KMedoids(NamedTuple):
    indices: Tensor  # (B, K): the token that stands for each cluster
    assignment: Tensor  # (B, N): the nearest medoid of each token


@torch.no_grad()
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

    The N×N distances are made once; an update adds their rows up by cluster, O(N²) additions.
    An empty cluster keeps its medoid. ``init`` as in :func:`~visualtokens.ops.seeds.seed_indices`;
    ``weights``, ``metric``, ``k >= N`` and ``k=0`` as in :func:`~visualtokens.ops.kmeans.kmeans`.
    The clustering has no gradient; tokens taken with :func:`~visualtokens.ops.take` have theirs.
    """
    check_finite("kmedoids", x=x, weights=weights, init=init)
    check_cluster_arguments(x, k, weights, iterations, metric)
    n = x.shape[1]
    if k >= n or k == 0:
        own = trivial_assignment(x, k)
        return KMedoids(own[:, : min(k, n)], own)
    distance = squared_distances(to_points(x, metric))  # (B, N, N)
    # PAPER: Eq. 17 prints no weight, but without it the step would not lower the objective of Eq. 13.
    weighted = distance if weights is None else distance * weights.to(distance.dtype).unsqueeze(2)
    medoids = seed_indices(init, x, k, weights=weights)  # (B, K)
    for _ in range(iterations):
        assignment = _nearest_medoid(distance, medoids)  # (B, N)
        cost = group_sum(weighted, assignment, k).gather(1, assignment.unsqueeze(1)).squeeze(1)  # (B, N)
        medoids = _cheapest(cost, assignment, medoids)
    return KMedoids(medoids, _nearest_medoid(distance, medoids))


def squared_distances(points: Tensor) -> Tensor:
    """‖x_i − x_j‖² for all pairs, ``(B, N, N)``; exactly zero on the diagonal and between equal points."""
    with torch.autocast(points.device.type, enabled=False):
        points = points - origin(points)
        products = points @ points.mT  # (B, N, N)
        square = products.diagonal(dim1=1, dim2=2)  # (B, N), rounded as the products are
        return (square.unsqueeze(1) + square.unsqueeze(2)).sub_(products, alpha=2).clamp_min_(0)


def _nearest_medoid(distance: Tensor, medoids: Tensor) -> Tensor:
    return take(distance, medoids).min(1).indices  # of (B, K, N), which the symmetry of the distances allows


def _cheapest(cost: Tensor, assignment: Tensor, medoids: Tensor) -> Tensor:
    """The token of lowest cost in each cluster, the lowest index on ties; ``medoids`` where it is empty."""
    b, n = cost.shape
    k = medoids.shape[1]
    lowest = cost.new_full((b, k), torch.inf).scatter_reduce(1, assignment, cost, "amin")  # (B, K)
    index = torch.arange(n, device=cost.device)
    candidates = torch.where(cost == lowest.gather(1, assignment), index, n)  # (B, N)
    first = medoids.new_full((b, k), n).scatter_reduce(1, assignment, candidates, "amin")  # (B, K)
    return torch.where(first < n, first, medoids)
