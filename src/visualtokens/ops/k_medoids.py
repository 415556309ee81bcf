"""K-medoids, plain and weighted, for a batch of token sets (Token Pooling Eq. 16–18)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from visualtokens.ops.checks import check_finite, own_precision
from visualtokens.ops.groups import take
from visualtokens.ops.k_means import Metric, check_cluster_arguments, origin, to_points, trivial_assignment
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
    ``weights``, ``metric``, ``k >= N`` and ``k=0`` as in :func:`~visualtokens.ops.k_means.kmeans`.
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


# K-medoids where few tokens go: distances for those alone, not for all N² pairs.
#
# Most tokens stay and stand for themselves. So only the G = N − K that go have to look for a medoid, and
# only they can take its place:
#
#     start     N²/4 distances between two halves: who has a near twin goes
#     update    G·N distances, from those that go to all
#     at last   G·N distances to find the medoids of those that are gone


def few_products(n: int, k: int, iterations: int) -> int:
    """How many pairs of tokens :func:`kmedoids_few` multiplies."""
    return (n + 1) // 2 * (n // 2) + (iterations + 1) * (n - k) * n


def few_is_less(n: int, k: int, iterations: int) -> bool:
    """Whether that is less than all pairs; K must be more than half of N."""
    return k > n // 2 and few_products(n, k, iterations) < n * n


def kmedoids_few(points: Tensor, k: int, *, weights: Tensor | None, iterations: int) -> tuple[Tensor, Tensor]:
    """Medoids ``(B, K)`` and the nearest of them for each of ``points (B, N, C)``, whose middle is near zero.

    As :func:`~visualtokens.ops.k_medoids` from the start "distinct" on, but that medoids always belong to
    themselves, even where two are equal, and ties between medoids go to the one of lowest token.
    """
    b, n, _ = points.shape
    square = torch.linalg.vector_norm(points, dim=2).square_()  # (B, N)
    here = torch.arange(n, device=points.device).expand(b, n)
    gone = _with_twins(points, square, n - k)  # (B, G)
    medoids = here.scatter(1, gone, n).sort(dim=1).values[:, :k]  # (B, K): all others
    for _ in range(iterations):
        medoid, cheapest = _update(points, square, weights, gone, here)
        medoids = here.scatter(1, medoid, cheapest).gather(1, medoids)
        gone = torch.where(cheapest == gone, medoid, gone)  # who takes a place leaves the other in its own
    staying = square.scatter(1, gone, torch.inf)  # nobody who is gone can be the nearest
    medoid = _products(points, staying, gone).min(2).indices  # (B, G)
    place = here.scatter(1, medoids, here[:, :k])  # (B, N): the number of a medoid's cluster
    return medoids, place.scatter(1, gone, place.gather(1, medoid))


def _with_twins(points: Tensor, square: Tensor, count: int) -> Tensor:
    """Those of every second token that lie nearest to one between them, ``(B, count)``."""
    ours, theirs = slice(0, None, 2), slice(1, None, 2)
    between = torch.baddbmm(square[:, None, theirs], points[:, ours], points[:, theirs].mT, alpha=-2)
    nearest = between.amin(2) + square[:, ours]  # (B, ceil(N / 2)): squared distances
    order = nearest.sort(dim=1, descending=True, stable=True).indices
    return 2 * order[:, order.shape[1] - count :]


def _update(
    points: Tensor, square: Tensor, weights: Tensor | None, gone: Tensor, here: Tensor
) -> tuple[Tensor, Tensor]:
    """For each token that is gone its medoid by Eq. 16, and the cheapest of their cluster by Eq. 17.

    Both ``(B, G)``. A cluster in which nobody is gone has one member and does not change.
    """
    distance = _products(points, square, gone).add_(square.gather(1, gone).unsqueeze(2))  # (B, G, N)
    distance = distance.scatter_(2, gone.unsqueeze(2), 0)  # to itself exactly
    among = gone.unsqueeze(1).expand(-1, gone.shape[1], -1)  # (B, G, G): none of them is a medoid
    far, medoid = distance.scatter(2, among, torch.inf).min(2)  # (B, G)
    own = here.scatter(1, gone, medoid)  # (B, N): the medoid of each token
    together = own.unsqueeze(1) == medoid.unsqueeze(2)  # (B, G, N)
    if weights is not None:
        distance, far = distance.mul_(weights.unsqueeze(1)), far * weights.gather(1, gone)
    cost = torch.where(together, distance, 0).sum(2)  # (B, G)
    costs = square.new_zeros(square.shape).scatter_add_(1, medoid, far).scatter_(1, gone, cost)  # (B, N)
    return medoid, torch.where(together, costs.unsqueeze(1), torch.inf).min(2).indices


def _products(points: Tensor, square: Tensor, rows: Tensor) -> Tensor:
    """‖x_j‖² − 2 x_i·x_j for the tokens i of ``rows (B, G)`` and all j: ``(B, G, N)``."""
    return torch.baddbmm(square.unsqueeze(1), take(points, rows), points.mT, alpha=-2)
