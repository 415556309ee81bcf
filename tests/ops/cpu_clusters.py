"""Medoids of random tokens as JSON, for one choice of kernels: ``python tests/ops/cpu_clusters.py``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import torch

if __name__ == "__main__":  # import visualtokens.ops without visualtokens: timm takes longer than the test
    package = ModuleType("visualtokens")
    package.__path__ = [str(Path(__file__).parents[2] / "src/visualtokens")]
    sys.modules["visualtokens"] = package

from visualtokens.ops import kmedoids
from visualtokens.ops.distances import origin, squared_distances

SIZES = ((5, 2, 2), (17, 5, 4), (33, 8, 9), (80, 16, 40), (197, 64, 49))  # N, C, K
SPARSE = (60, 16, 54)  # few tokens are dropped, so that the sparse form is used


def tokens(n: int, c: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two images ``(2, N, C)`` and weights ``(2, N)`` in float64, without ties."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(2, n, c, generator=generator, dtype=torch.float64) + 10
    return x, 0.5 + torch.rand(2, n, generator=generator, dtype=torch.float64)


def cluster() -> dict[str, list[object]]:
    """Medoids and assignments in both precisions; asserts that the distances are symmetric."""
    found: dict[str, list[object]] = {}
    for n, c, k in (*SIZES, SPARSE):
        for dtype in (torch.float64, torch.float32):
            x, weights = tokens(n, c)
            x = x.to(dtype)
            distance = squared_distances(x - origin(x))
            assert torch.equal(distance, distance.mT), f"not symmetric: N={n}, C={c}, {dtype}"
            assert (distance.diagonal(dim1=1, dim2=2) == 0).all()
            init = "distinct" if (n, c, k) == SPARSE else torch.arange(k)
            result = kmedoids(x, k, weights=weights, init=init)
            found[f"{n} {c} {k} {dtype}"] = [result.indices.tolist(), result.assignment.tolist()]
    return found


if __name__ == "__main__":
    print(json.dumps(cluster()))  # noqa: T201
