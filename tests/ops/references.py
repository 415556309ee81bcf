"""K-means and k-medoids exactly as the equations state them, one image, token and cluster at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def reference_kmeans(
    x: Tensor, start: Tensor, weights: Tensor | None, iterations: int, metric: str
) -> tuple[Tensor, Tensor]:
    """Eq. 14 and 15 from the tokens ``start (B, K)``: centres ``(B, K, C)`` and assignment ``(B, N)``."""
    all_centres, all_assignments = [], []
    for b in range(len(x)):
        points, w = _points(x[b], metric), _weights(x, weights, b)
        centres = points[start[b].numpy()].copy()
        for _ in range(iterations):
            assignment = _nearest(points, centres)
            for j in range(len(centres)):
                members = [i for i in range(len(points)) if assignment[i] == j]
                total = sum(w[i] for i in members)
                if total > 0:
                    centres[j] = sum(w[i] * points[i] for i in members) / total
                    if metric == "cosine":
                        centres[j] /= np.linalg.norm(centres[j])
        all_centres.append(centres)
        all_assignments.append(_nearest(points, centres))
    return torch.from_numpy(np.stack(all_centres)), torch.tensor(all_assignments)


def reference_kmedoids(
    x: Tensor, start: Tensor, weights: Tensor | None, iterations: int, metric: str
) -> tuple[Tensor, Tensor]:
    """Eq. 16 and 17 from the tokens ``start (B, K)``: medoids ``(B, K)`` and assignment ``(B, N)``."""
    all_medoids, all_assignments = [], []
    for b in range(len(x)):
        points, w, medoids = _points(x[b], metric), _weights(x, weights, b), start[b].tolist()
        for _ in range(iterations):
            assignment = _nearest(points, points[medoids])
            for j in range(len(medoids)):
                members = [i for i in range(len(points)) if assignment[i] == j]
                costs = [sum(w[o] * _squared(points[i], points[o]) for o in members) for i in members]
                if members:
                    medoids[j] = members[int(np.argmin(costs))]
        all_medoids.append(medoids)
        all_assignments.append(_nearest(points, points[medoids]))
    return torch.tensor(all_medoids), torch.tensor(all_assignments)


def _points(image: Tensor, metric: str) -> np.ndarray:
    points = image.double().numpy()
    return points / np.linalg.norm(points, axis=1, keepdims=True) if metric == "cosine" else points


def _weights(x: Tensor, weights: Tensor | None, b: int) -> np.ndarray:
    return np.ones(x.shape[1]) if weights is None else weights[b].double().numpy()


def _nearest(points: np.ndarray, centres: np.ndarray) -> list[int]:
    """The index of the nearest centre of each point; ``argmin`` returns the lowest on ties."""
    return [int(np.argmin([_squared(point, centre) for centre in centres])) for point in points]


def _squared(a: np.ndarray, b: np.ndarray) -> float:
    return float(((a - b) ** 2).sum())
