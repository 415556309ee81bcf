"""K-medoids where few tokens go, against the same slow reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visualtokens.ops import kmedoids
from visualtokens.ops.k_medoids import few_is_less, kmedoids_few, products
from visualtokens.ops.seeds import distinct_indices

from .helpers import EXAMPLES, LargestTensor, assert_same_leaves, compiled, rand, randn
from .slow_kmedoids import METRICS, reference


@st.composite
def few_problems(draw: st.DrawFn) -> dict[str, Any]:
    b, n, c = draw(st.integers(1, 3)), draw(st.integers(2, 24)), draw(st.integers(2, 9))
    seed = draw(st.integers(0, 10_000))
    weights = rand(b, n, seed=seed + 7) * (rand(b, n, seed=seed + 8) > 0.3)
    return {
        "x": randn(b, n, c, seed=seed),
        "k": draw(st.integers(n // 2 + 1, n - 1)) if n > 2 else 1,
        "weights": weights if draw(st.booleans()) else None,
        "iterations": draw(st.integers(0, 4)),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@EXAMPLES
@given(problem=few_problems())
def test_few_that_go_equals_the_reference(dtype: torch.dtype, problem: dict[str, Any]) -> None:
    """Also where the other way would multiply less."""
    x, k, weights = problem["x"].to(dtype), problem["k"], problem["weights"]
    if k <= x.shape[1] // 2:
        return
    cast = None if weights is None else weights.to(dtype)
    indices, assignment = kmedoids_few(x, k, weights=cast, iterations=problem["iterations"])
    expected = reference(x, distinct_indices(x, k), weights, problem["iterations"], "euclidean")
    assert indices.tolist() == expected[0]
    assert assignment.tolist() == expected[1]


@EXAMPLES
@given(seed=st.integers(0, 10_000), n=st.integers(10, 40), go=st.integers(1, 3), iterations=st.integers(0, 2))
def test_a_shift_and_the_metric_reach_the_few(seed: int, n: int, go: int, iterations: int) -> None:
    x, weights = randn(2, n, 6, seed=seed), rand(2, n, seed=seed + 1)
    for metric in METRICS:
        options: dict[str, Any] = {"weights": weights, "init": "distinct", "iterations": iterations}
        got = kmedoids(x + 3, n - go, metric=metric, **options)
        points = x + 3 if metric == "euclidean" else torch.nn.functional.normalize(x + 3, dim=2)
        start = distinct_indices(points, n - go)
        expected = reference(points, start, weights, iterations, "euclidean")
        assert got.indices.tolist() == expected[0]
        assert got.assignment.tolist() == expected[1]


@pytest.mark.parametrize("outlier", [0, 72, 97, 98, 195])
def test_float32_survives_an_outlier(outlier: int) -> None:
    """One token of huge norm must not cost the others their digits."""
    x = randn(1, 196, 64, seed=19)
    x[0, outlier] *= 300
    exact, single = (kmedoids(x.to(t), 180, init="distinct") for t in (torch.float64, torch.float32))
    assert (exact.assignment == single.assignment).double().mean() >= 0.99


def test_nothing_larger_than_the_quarter_or_the_rows_is_made() -> None:
    """Few that go are compared with all, and halves with each other: never all with all (N = 64, C = 8)."""
    b, n, go = 2, 64, 4
    with LargestTensor() as largest:
        kmedoids(randn(b, n, 8), n - go, weights=rand(b, n), init="distinct", iterations=1)
    assert largest.numel == b * n * n // 4, largest.operation


def test_equal_medoids_each_stay_with_themselves() -> None:
    """Of four equal tokens two go, both to the lowest that stays; the other that stays has none."""
    x = torch.tensor([0.0, 0.0, 0.0, 0.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0]).view(1, 10, 1)
    indices, assignment = kmedoids_few(x, 8, weights=None, iterations=1)
    assert indices.tolist() == [[0, 3, 4, 5, 6, 7, 8, 9]]
    assert assignment.tolist() == [[0, 0, 0, 1, 2, 3, 4, 5, 6, 7]]


def test_products_are_those_of_the_way_that_is_taken() -> None:
    assert products(196, 187, 1, distinct=False) == 196**2
    assert products(196, 187, 1, distinct=True) == 98**2 + 2 * 9 * 196
    assert products(196, 100, 1, distinct=True) == 196**2  # too many go
    assert not few_is_less(10, 5, 1)  # half of them: the halves are dealt out again


def test_few_that_go_compile_to_one_graph_and_keep_bad_values_apart(checks_off: None) -> None:
    def few(x: Tensor, weights: Tensor) -> Any:
        return kmedoids(x, x.shape[1] - 2, weights=weights, init="distinct", iterations=1)

    one_graph = compiled(few)
    for n in (20, 31):
        x, weights = randn(2, n, 4, seed=16), rand(2, n, seed=17)
        expected = few(x, weights)
        assert_same_leaves(one_graph(x, weights), expected)
        x[0, 3, 1] = torch.nan
        result = few(x, weights)
        assert torch.equal(result.indices[1], expected.indices[1])
        assert torch.equal(result.assignment[1], expected.assignment[1])
        assert ((result.indices[0] >= 0) & (result.indices[0] < n)).all()
        assert ((result.assignment[0] >= 0) & (result.assignment[0] < n - 2)).all()
