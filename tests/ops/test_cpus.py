"""Clustering gives the same answer whichever kernels the libraries choose for a processor."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.cpu_matrix import COMBINATIONS, environment
from visualtokens.ops import kmedoids
from visualtokens.ops.k_medoids import squared_distances

from .helpers import rand, randn
from .slow_kmedoids import reference

SIZES = ((5, 2, 2), (17, 5, 4), (33, 8, 9), (80, 16, 40), (197, 64, 49))  # N, C, K
FEW_ARE_DROPPED = (60, 16, 54)  # takes the way that makes fewer distances


def cluster() -> dict[str, list[object]]:
    """Medoids and assignments of random tokens, which have no ties, in both precisions."""
    found: dict[str, list[object]] = {}
    for n, c, k in (*SIZES, FEW_ARE_DROPPED):
        for dtype in (torch.float64, torch.float32):
            x, weights = randn(2, n, c, seed=n).to(dtype) + 10, 0.5 + rand(2, n, seed=n + 1)
            distance = squared_distances(x)
            assert torch.equal(distance, distance.mT), f"not symmetric: N={n}, C={c}, {dtype}"
            assert (distance.diagonal(dim1=1, dim2=2) == 0).all()
            init = "distinct" if (n, c, k) == FEW_ARE_DROPPED else torch.arange(k)
            result = kmedoids(x, k, weights=weights, init=init)
            found[f"{n} {c} {k} {dtype}"] = [result.indices.tolist(), result.assignment.tolist()]
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("oldest-threads-3", "avx2") else [pytest.mark.slow])
        for name in COMBINATIONS
    ],
)
def test_medoids_are_the_same_on_every_processor(name: str) -> None:
    """Also symmetric distances: the other process checks them."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import json; from tests.ops.test_cpus import cluster; print(json.dumps(cluster()))",
        ],
        env=environment(name),
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == cluster()


def test_medoids_are_those_of_the_reference() -> None:
    """In whichever process this runs; ``make test-cpus`` runs it in all."""
    found = cluster()
    for n, c, k in SIZES:
        weights = 0.5 + rand(2, n, seed=n + 1)
        expected = reference(
            randn(2, n, c, seed=n) + 10, torch.arange(k).expand(2, k), weights, 3, "euclidean"
        )
        for dtype in (torch.float64, torch.float32):
            assert found[f"{n} {c} {k} {dtype}"] == list(expected)
