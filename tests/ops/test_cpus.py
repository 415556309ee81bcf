"""K-medoids gives the same result with the kernels that the libraries choose on other processors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.cpu_matrix import COMBINATIONS, environment

from . import cpu_clusters
from .references import reference_kmedoids

QUICK = ("oldest-threads-3", "avx2")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in COMBINATIONS],
)
def test_medoids_are_the_same_on_every_processor(name: str) -> None:
    """The subprocess also asserts that its distances are symmetric."""
    done = subprocess.run(
        [sys.executable, cpu_clusters.__file__], env=environment(name), text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == cpu_clusters.cluster()


def test_medoids_equal_the_reference() -> None:
    """With the kernels of this process; ``make test-cpus`` runs it with all others."""
    found = cpu_clusters.cluster()
    for n, c, k in cpu_clusters.SIZES[:-1]:
        x, weights = cpu_clusters.tokens(n, c)
        expected = reference_kmedoids(x, torch.arange(k).expand(2, k), weights, 3, "euclidean")
        for dtype in (torch.float64, torch.float32):
            assert found[f"{n} {c} {k} {dtype}"] == [part.tolist() for part in expected]
