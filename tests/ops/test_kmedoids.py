from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visualtokens.ops import kmedoids, take
from visualtokens.ops.k_medoids import medoids, squared_distances

from .helpers import (
    EXAMPLES,
    MANY_EXAMPLES,
    LargestTensor,
    assert_close,
    assert_same_leaves,
    compiled,
    layouts,
    rand,
    randint,
    randn,
)
from .slow_kmedoids import METRICS, cost, distances, reference


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    b, n, c = draw(st.integers(1, 3)), draw(st.integers(2, 20)), draw(st.integers(2, 9))
    k, seed = draw(st.integers(1, n - 1)), draw(st.integers(0, 10_000))
    order = [torch.randperm(n, generator=torch.Generator().manual_seed(seed + i))[:k] for i in range(b)]
    # A third of the weights are zero, so that some clusters may have none.
    weights = rand(b, n, seed=seed + 7) * (rand(b, n, seed=seed + 8) > 0.3)
    return {
        "x": randn(b, n, c, seed=seed) + draw(st.sampled_from([0.0, 3.0])),
        "k": k,
        "init": torch.stack(order),
        "weights": weights if draw(st.booleans()) else None,
        "iterations": draw(st.integers(0, 4)),
        "metric": draw(st.sampled_from(METRICS)),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@EXAMPLES
@given(problem=problems())
def test_equals_the_reference(dtype: torch.dtype, problem: dict[str, Any]) -> None:
    problem["x"] = problem["x"].to(dtype)
    result = kmedoids(**problem)
    medoids, assignment = reference(
        problem["x"], problem["init"], problem["weights"], problem["iterations"], problem["metric"]
    )
    assert result.indices.tolist() == medoids
    assert result.assignment.tolist() == assignment


@EXAMPLES
@given(problem=problems())
def test_objective_never_rises(problem: dict[str, Any]) -> None:
    """Eq. 13 under the medoid constraint, one more update at a time."""
    problem.pop("iterations")
    x, weights = problem["x"], problem["weights"]
    weights = torch.ones(x.shape[:2]) if weights is None else weights
    before = [float("inf")] * x.shape[0]
    for iterations in range(6):
        medoids = kmedoids(**problem, iterations=iterations).indices
        for b in range(x.shape[0]):
            to_medoids = distances(x[b], problem["metric"])[:, medoids[b].numpy()]  # (N, K)
            now = float((weights[b].numpy() * to_medoids.min(1)).sum())
            assert now <= before[b] + 1e-9
            before[b] = now


@EXAMPLES
@given(problem=problems())
def test_medoids_belong_to_their_own_cluster(problem: dict[str, Any]) -> None:
    result = kmedoids(**problem)
    for b in range(problem["x"].shape[0]):
        for j in range(problem["k"]):
            assert result.assignment[b, result.indices[b, j]] == j
    assert result.indices.shape == (problem["x"].shape[0], problem["k"])


@EXAMPLES
@given(problem=problems())
def test_an_update_takes_the_cheapest_member(problem: dict[str, Any]) -> None:
    problem.pop("iterations")
    x, w = problem["x"], problem["weights"]
    first, second = kmedoids(**problem, iterations=0), kmedoids(**problem, iterations=1)
    for b in range(x.shape[0]):
        distance = distances(x[b], problem["metric"])
        weight = np.ones(x.shape[1]) if w is None else w[b].numpy()
        for j in range(problem["k"]):
            members = (first.assignment[b] == j).nonzero().flatten().tolist()
            chosen = int(second.indices[b, j])
            assert chosen in members
            lowest = min(cost(distance, i, members, weight) for i in members)
            assert cost(distance, chosen, members, weight) <= lowest + 1e-9


@EXAMPLES
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(2, 30),
    k=st.integers(1, 12),
    distinct=st.integers(1, 6),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_duplicated_tokens(seed: int, n: int, k: int, distinct: int, dtype: torch.dtype) -> None:
    """Equal tokens go to the same cluster, and of equal medoids the lowest takes them all.

    Whole numbers, whose products are exact however a processor adds them up.
    """
    x = randint(50, 1, distinct, 5, seed=seed).to(dtype)[:, randint(distinct, n, seed=seed + 1)]
    result = kmedoids(x, min(k, n - 1))
    for i in range(n):
        same = [j for j in range(n) if torch.equal(x[0, i], x[0, j])]
        assert len(set(result.assignment[0, same].tolist())) == 1
    for j, medoid in enumerate(result.indices[0].tolist()):
        members = (result.assignment[0] == j).nonzero().flatten().tolist()
        assert medoid in members or not members


@MANY_EXAMPLES
@given(seed=st.integers(0, 10_000), n=st.integers(4, 12), k=st.integers(2, 3), c=st.integers(1, 2))
def test_exact_ties_go_to_the_lowest_index(seed: int, n: int, k: int, c: int) -> None:
    """Small whole numbers have exact distances, so here a tie is a tie and not a rounding."""
    x = randint(4, 1, n, c, seed=seed).double()
    init = torch.arange(k).unsqueeze(0)
    medoids, assignment = reference(x, init, None, 2, "euclidean")
    result = kmedoids(x, k, init=init, iterations=2)
    assert result.indices.tolist() == medoids
    assert result.assignment.tolist() == assignment


@EXAMPLES
@given(problem=problems())
def test_images_do_not_influence_each_other(problem: dict[str, Any]) -> None:
    whole, again = kmedoids(**problem), kmedoids(**problem)
    assert_same_leaves(again, whole)
    flipped = dict(problem, x=problem["x"].flip(0), init=problem["init"].flip(0))
    flipped["weights"] = None if problem["weights"] is None else problem["weights"].flip(0)
    assert torch.equal(kmedoids(**flipped).indices, whole.indices.flip(0))
    for i in range(problem["x"].shape[0]):
        one = dict(problem, x=problem["x"][i : i + 1], init=problem["init"][i : i + 1])
        one["weights"] = None if problem["weights"] is None else problem["weights"][i : i + 1]
        assert torch.equal(kmedoids(**one).assignment[0], whole.assignment[i])


@EXAMPLES
@given(problem=problems())
def test_cosine_does_not_see_lengths_and_euclidean_not_shifts(problem: dict[str, Any]) -> None:
    x = problem.pop("x")
    if problem["metric"] == "cosine":
        changed = x * (0.01 + 100 * rand(*x.shape[:2], 1, seed=11))
    else:
        changed = x @ torch.linalg.qr(randn(x.shape[2], x.shape[2], seed=9)).Q + 10
    assert torch.equal(kmedoids(x, **problem).assignment, kmedoids(changed, **problem).assignment)


def test_equal_distances_within_a_pair_take_the_lower_index() -> None:
    """Two tokens of equal weight cost each other the same: the matrix must be symmetric to the bit."""
    x = randn(4, 40, 16, seed=3, dtype=torch.float32).repeat_interleave(2, 1)
    x += 1e-2 * randn(4, 80, 16, seed=4, dtype=torch.float32)  # forty pairs
    result = kmedoids(x, 40, init=torch.arange(1, 80, 2), iterations=1)
    assert result.indices.tolist() == [list(range(0, 80, 2))] * 4


def test_a_cluster_that_empties_keeps_its_medoid() -> None:
    """Of two equal medoids the second gets nobody at first, so it stays until the first moves away."""
    x = torch.tensor([0.0, 0.0, 0.1, 0.2, 5.0]).view(1, 5, 1)
    assert kmedoids(x, 3, init=torch.tensor([0, 1, 4]), iterations=0).assignment.tolist() == [[0, 0, 0, 0, 2]]
    assert kmedoids(x, 3, init=torch.tensor([0, 1, 4]), iterations=1).indices.tolist() == [[2, 1, 4]]
    result = kmedoids(x, 3, init=torch.tensor([0, 1, 4]))
    medoids, assignment = reference(x, torch.tensor([[0, 1, 4]]), None, 3, "euclidean")
    assert result.indices.tolist() == medoids
    assert result.assignment.tolist() == assignment


def test_all_tokens_equal() -> None:
    result = kmedoids(torch.full((1, 9, 4), 0.3), 3)
    assert (result.assignment == 0).all()
    assert result.indices.tolist() == [[0, 3, 6]]  # the first takes all, the others keep their seeds


@pytest.mark.parametrize("outlier", [0, 97, 195])
def test_float32_survives_an_outlier(outlier: int) -> None:
    """Vision transformers have single tokens of huge norm; they must not cost the others their digits."""
    x = randn(1, 196, 64, seed=19)
    x[0, outlier] *= 1000
    first = torch.arange(10, 20)
    exact, single = (kmedoids(x.to(dtype), 10, init=first) for dtype in (torch.float64, torch.float32))
    assert (exact.assignment == single.assignment).double().mean() >= 0.99


@pytest.mark.parametrize("k", [5, 6, 100])
def test_as_many_clusters_as_tokens(k: int) -> None:
    result = kmedoids(randn(2, 5, 3), k)
    assert result.indices.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert result.assignment.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_no_cluster_and_one_cluster() -> None:
    x = randn(2, 5, 3, seed=8)
    none = kmedoids(x, 0)
    assert none.indices.shape == (2, 0)
    assert none.assignment.tolist() == [[-1] * 5] * 2
    one = kmedoids(x, 1)
    assert one.indices.tolist() == [[int(distances(image, "euclidean").sum(0).argmin())] for image in x]
    assert kmedoids(x[:, :1], 1).indices.tolist() == [[0], [0]]


def test_no_image() -> None:
    result = kmedoids(torch.zeros(0, 6, 3), 2)
    assert result.indices.shape == (0, 2)
    assert result.assignment.shape == (0, 6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("metric", METRICS)
def test_low_precision_tokens_are_clustered_in_float32(dtype: torch.dtype, metric: Any) -> None:
    x, weights = randn(2, 40, 8, seed=9, dtype=dtype), rand(2, 40, seed=10, dtype=dtype)
    result = kmedoids(x, 6, weights=weights, metric=metric, init=torch.arange(6))
    medoids, assignment = reference(x, torch.arange(6).expand(2, 6), weights, 3, metric)
    assert result.indices.tolist() == medoids
    assert result.assignment.tolist() == assignment


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.int64, torch.bool])
def test_weights_of_any_type(weight_dtype: torch.dtype) -> None:
    """Counts and masks are weights as well as scores are."""
    x, weights = randn(2, 10, 3, seed=11), torch.tensor([[1, 0, 1, 1, 0, 1, 1, 0, 1, 1]] * 2)
    expected = kmedoids(x, 3, weights=weights.double())
    assert_same_leaves(kmedoids(x, 3, weights=weights.to(weight_dtype)), expected)


def test_memory_layout_does_not_matter_and_inputs_stay() -> None:
    x = randn(3, 12, 4, seed=12)
    before, expected = x.clone(), kmedoids(x, 4)
    for _, other in layouts(x):
        assert_same_leaves(kmedoids(other, 4), expected)
    expanded = x[:1].expand(3, -1, -1)
    assert_same_leaves(kmedoids(expanded, 4), kmedoids(expanded.clone(), 4))
    assert torch.equal(x, before)


@pytest.mark.parametrize("weighted", [False, True])
def test_nothing_larger_than_the_distances_is_made(weighted: bool) -> None:
    """One N×N matrix per image and no N×N×K or N×N×C intermediate (N = 64, K = 16, C = 8)."""
    b, n, k = 2, 64, 16
    x, weights = randn(b, n, 8), rand(b, n) if weighted else None
    with LargestTensor() as largest:
        kmedoids(x, k, weights=weights)
    assert largest.numel == b * n * n, largest.operation


def test_squared_distances() -> None:
    x = randn(2, 17, 5, seed=5) + 10
    x[:, 9] = x[:, 4]
    result = squared_distances(x)
    expected = np.stack([distances(image, "euclidean") for image in x])
    assert_close(result, expected)
    assert torch.equal(result, result.mT)
    assert (result >= 0).all()
    assert (result.diagonal(dim1=1, dim2=2) == 0).all()
    assert_close(result[:, 9, 4], torch.zeros(2))


def test_squared_distances_are_never_negative() -> None:
    """Nearly equal tokens far from zero: the difference of products rounds to either side of zero."""
    close = randn(1, 2, 64, seed=6).repeat(1, 30, 1) + 1e-5 * randn(1, 60, 64, seed=7)
    assert (squared_distances(close.float()) >= 0).all()


def test_autocast_changes_nothing() -> None:
    x = randn(2, 200, 16, seed=15, dtype=torch.float32)
    expected = kmedoids(x, 20)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_leaves(kmedoids(x, 20), expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_compiles_to_one_graph(weighted: bool) -> None:
    one_graph = compiled(kmedoids)
    for n in (12, 20):  # the second size makes the graph symbolic
        x, weights = randn(2, n, 4, seed=16), rand(2, n, seed=17) if weighted else None
        expected = kmedoids(x, 3, weights=weights, iterations=2)
        assert_same_leaves(one_graph(x, 3, weights=weights, iterations=2), expected)


def test_tokens_taken_by_index_have_gradients() -> None:
    x = randn(2, 12, 4, seed=16).requires_grad_()
    medoids = kmedoids(x, 3).indices
    take(x, medoids).sum().backward()
    expected = torch.zeros(2, 12).scatter(1, medoids, 1.0)
    assert x.grad is not None
    assert_close(x.grad[:, :, 0], expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_value_spoils_its_own_image_only(bad: float, checks_off: None) -> None:
    x = randn(2, 12, 4, seed=18)
    expected = kmedoids(x, 3)
    x[0, 3, 1] = bad
    result = kmedoids(x, 3)
    assert torch.equal(result.indices[1], expected.indices[1])
    assert torch.equal(result.assignment[1], expected.assignment[1])
    assert ((result.indices[0] >= 0) & (result.indices[0] < 12)).all()
    assert ((result.assignment[0] >= 0) & (result.assignment[0] < 3)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 3)}, r"shape \(4, 3\); expected \(B, N, C\)"),
        ({"k": -1}, "k=-1 is negative"),
        ({"iterations": -2}, "iterations=-2 is negative"),
        ({"weights": torch.ones(2, 3)}, r"weights have shape \(2, 3\); expected \(B, N\) = \(1, 4\)"),
        ({"metric": "manhattan"}, "metric='manhattan'"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(1, 4, 3), "k": 2}
    with pytest.raises(ValueError, match=message):
        kmedoids(**(arguments | change))


@EXAMPLES
@given(problem=problems())
def test_medoids_alone_are_the_same(problem: dict[str, Any]) -> None:
    problem.pop("metric")
    assert torch.equal(medoids(**problem), kmedoids(**problem).indices)


@pytest.mark.parametrize("k", [0, 5, 6, 9])
def test_medoids_alone_at_the_edges(k: int) -> None:
    x = randn(2, 6, 3)
    assert torch.equal(medoids(x, k), kmedoids(x, k).indices)
