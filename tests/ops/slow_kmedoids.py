"""K-medoids word for word, to compare with."""

from __future__ import annotations

import numpy as np
from torch import Tensor

METRICS = ("euclidean", "cosine")


def distances(points: Tensor, metric: str) -> np.ndarray:
    """``(N, N)`` squared differences of one image, in float64."""
    p = points.double().numpy()
    if metric == "cosine":
        p = p / np.linalg.norm(p, axis=1, keepdims=True)
    return ((p[:, None] - p[None]) ** 2).sum(2)


def assign(distance: np.ndarray, medoids: list[int]) -> list[int]:
    """Eq. 16; `argmin` takes the first of several."""
    return [int(np.argmin([distance[i, m] for m in medoids])) for i in range(len(distance))]


def cost(distance: np.ndarray, i: int, members: list[int], w: np.ndarray) -> float:
    """What Eq. 17 adds up, with the weights of Eq. 13."""
    return sum(w[other] * distance[i, other] for other in members)


def reference(
    x: Tensor, medoids: Tensor, weights: Tensor | None, iterations: int, metric: str
) -> tuple[list[list[int]], list[list[int]]]:
    """Eq. 16 and 17 word for word: one image, one cluster and one candidate at a time."""
    all_medoids, all_assignments = [], []
    for b in range(x.shape[0]):
        distance, now = distances(x[b], metric), medoids[b].tolist()
        w = np.ones(x.shape[1]) if weights is None else weights[b].double().numpy()
        for _ in range(iterations):
            a = assign(distance, now)
            for j in range(len(now)):
                members = [i for i in range(len(a)) if a[i] == j]
                if members:
                    now[j] = members[int(np.argmin([cost(distance, i, members, w) for i in members]))]
        all_medoids.append(now)
        all_assignments.append(assign(distance, now))
    return all_medoids, all_assignments
