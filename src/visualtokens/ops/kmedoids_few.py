"""K-medoids where few tokens go: distances for those alone, not for all N² pairs.

Most tokens stay and stand for themselves. So only the G = N − K that go have to look for a medoid, and
only they can take its place:

    start     N²/4 distances between two halves: who has a near twin goes
    update    G·N distances, from those that go to all
    at last   G·N distances to find the medoids of those that are gone
"""

from __future__ import annotations

import torch
from torch import Tensor

from visualtokens.ops.hard import take


def few_products(n: int, k: int, iterations: int) -> int:
    """How many pairs of tokens :func:`kmedoids_few` multiplies."""
    return (n + 1) // 2 * (n // 2) + (iterations + 1) * (n - k) * n


def few_is_less(n: int, k: int, iterations: int) -> bool:
    """Whether that is less than all pairs; K must be more than half of N."""
    return k > n // 2 and few_products(n, k, iterations) < n * n


def kmedoids_few(points: Tensor, k: int, *, weights: Tensor | None, iterations: int) -> tuple[Tensor, Tensor]:
    """Medoids ``(B, K)`` and the nearest of them for each of ``points (B, N, C)``, whose middle is near zero.

    As :func:`~visualtokens.ops.kmedoids` from the start "distinct" on, but that medoids always belong to
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
