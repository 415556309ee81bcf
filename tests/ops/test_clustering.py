"""K-means and k-medoids: the properties of both, then those of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visualtokens.ops import kmeans, kmedoids, take

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
from .references import reference_kmeans, reference_kmedoids

METRICS = ("euclidean", "cosine")
REFERENCES: dict[Callable[..., Any], Callable[..., tuple[Tensor, Tensor]]] = {
    kmeans: reference_kmeans,
    kmedoids: reference_kmedoids,
}
both = pytest.mark.parametrize("cluster", REFERENCES)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    b, n, c = draw(st.integers(1, 3)), draw(st.integers(2, 20)), draw(st.integers(2, 9))
    k, seed = draw(st.integers(1, n - 1)), draw(st.integers(0, 10_000))
    order = [torch.randperm(n, generator=torch.Generator().manual_seed(seed + i))[:k] for i in range(b)]
    # A third of the weights are zero, so that the weight of a whole cluster can be zero.
    weights = rand(b, n, seed=seed + 1) * (rand(b, n, seed=seed + 2) > 0.3)
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    return {
        "x": (randn(b, n, c, seed=seed) + draw(st.sampled_from([0.0, 3.0]))).to(dtype),
        "k": k,
        "init": torch.stack(order),
        "weights": weights if draw(st.booleans()) else None,
        "iterations": draw(st.integers(0, 4)),
        "metric": draw(st.sampled_from(METRICS)),
    }


def assert_result(result: Any, expected: tuple[Tensor, Tensor]) -> None:
    """Same assignment, and same medoids or nearly the same centres."""
    if expected[0].is_floating_point():
        assert_close(result[0], expected[0])
    else:
        assert torch.equal(result[0], expected[0])
    assert torch.equal(result[1], expected[1])


def objective(x: Tensor, result: Any, weights: Tensor | None, metric: str) -> Tensor:
    """Eq. 13, ``(B,)``."""
    if metric == "cosine":
        x = F.normalize(x, dim=2)
    centres = result.centres if hasattr(result, "centres") else take(x, result.indices)
    distance = (x.unsqueeze(2) - centres.unsqueeze(1)).square().sum(3).amin(2)  # (B, N)
    return (distance if weights is None else weights * distance).sum(1)


@both
@EXAMPLES
@given(problem=problems())
def test_equals_the_reference(cluster: Any, problem: dict[str, Any]) -> None:
    before = problem["x"].clone()
    result = cluster(**problem)
    start, options = problem["init"], (problem["weights"], problem["iterations"], problem["metric"])
    assert_result(result, REFERENCES[cluster](problem["x"], start, *options))
    assert torch.equal(problem["x"], before)
    if cluster is kmeans:
        assert result.centres.dtype == problem["x"].dtype


@both
@EXAMPLES
@given(problem=problems())
def test_objective_never_rises(cluster: Any, problem: dict[str, Any]) -> None:
    x = problem["x"] = problem["x"].double()
    del problem["iterations"]
    before = torch.full((len(x),), torch.inf, dtype=torch.float64)
    for iterations in range(5):
        result = cluster(**problem, iterations=iterations)
        now = objective(x, result, problem["weights"], problem["metric"])
        assert (now <= before + 1e-9).all()
        before = now


@both
@EXAMPLES
@given(problem=problems())
def test_each_image_is_clustered_alone(cluster: Any, problem: dict[str, Any]) -> None:
    whole = cluster(**problem)
    for i in range(len(problem["x"])):
        one = dict(problem, x=problem["x"][i : i + 1], init=problem["init"][i : i + 1])
        one["weights"] = None if problem["weights"] is None else problem["weights"][i : i + 1]
        assert_result([part[0] for part in cluster(**one)], [part[i] for part in whole])


@both
@EXAMPLES
@given(problem=problems())
def test_euclidean_ignores_rigid_motions_and_cosine_ignores_lengths(
    cluster: Any, problem: dict[str, Any]
) -> None:
    x = problem.pop("x").double()
    if problem["metric"] == "cosine":
        changed = x * (0.01 + 100 * rand(*x.shape[:2], 1, seed=11))
    else:
        changed = x @ torch.linalg.qr(randn(x.shape[2], x.shape[2], seed=9)).Q + 100
    assert torch.equal(cluster(x, **problem).assignment, cluster(changed, **problem).assignment)


@both
@MANY_EXAMPLES
@given(seed=st.integers(0, 10_000), n=st.integers(4, 12), k=st.integers(2, 3), c=st.integers(1, 2))
def test_ties_resolve_to_the_lowest_index(cluster: Any, seed: int, n: int, k: int, c: int) -> None:
    """Distances between small integers are exact, so equal ones are ties and not rounding errors."""
    x, start = randint(4, 1, n, c, seed=seed).double(), torch.arange(k).unsqueeze(0)
    iterations = 2 if cluster is kmedoids else 0  # means are fractions
    expected = REFERENCES[cluster](x, start, None, iterations, "euclidean")
    assert_result(cluster(x, k, init=start, iterations=iterations), expected)


@both
@pytest.mark.parametrize("outlier", [0, 97, 195])  # the tokens that decide the origin
def test_float32_tolerates_an_outlier_and_an_offset(cluster: Any, outlier: int) -> None:
    """Vision transformers have single tokens of huge norm."""
    x, start = randn(1, 196, 64, seed=19), torch.arange(10, 20)
    x[0, outlier] *= 1000
    expected = cluster(x, 10, init=start).assignment
    for offset in (0, 1000):
        single = cluster((x + offset).float(), 10, init=start).assignment
        assert (expected == single).double().mean() >= 0.97


@both
def test_as_many_clusters_as_tokens_one_cluster_or_none(cluster: Any) -> None:
    x = randn(2, 5, 3, seed=7)
    each = torch.arange(5).expand(2, 5)
    for k in (5, 100):
        assert_result(cluster(x, k), (x if cluster is kmeans else each, each))
    none = cluster(x, 0)
    assert none[0].shape[1] == 0
    assert none.assignment.tolist() == [[-1] * 5] * 2
    assert (cluster(x, 1).assignment == 0).all()
    assert_result(cluster(x[:, :1], 1), (x[:, :1] if cluster is kmeans else each[:, :1], each[:, :1]))
    empty = cluster(x[:0], 2)
    assert empty[0].shape[:2] == (0, 2)
    assert empty.assignment.shape == (0, 5)


@both
def test_all_tokens_equal(cluster: Any) -> None:
    """The first cluster takes all tokens; the others are empty and keep their seeds."""
    x = torch.full((1, 9, 4), 0.3)
    result = cluster(x, 3)
    assert (result.assignment == 0).all()
    assert_close(result[0].double(), x[:, :3] if cluster is kmeans else [[0, 3, 6]], torch.float32)


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_tokens_are_clustered_in_float32(cluster: Any, dtype: torch.dtype) -> None:
    x, weights = randn(1, 60, 8, seed=9, dtype=dtype), rand(1, 60, seed=10, dtype=dtype)
    start = torch.arange(6).expand(1, 6)
    expected = REFERENCES[cluster](x, start, weights, 2, "cosine")
    assert_result(cluster(x, 6, weights=weights, init=start, iterations=2, metric="cosine"), expected)


@both
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_counts_and_masks_as_weights(cluster: Any, dtype: torch.dtype) -> None:
    x, weights = randn(2, 10, 3, seed=11), torch.tensor([[1, 0, 1, 1, 0, 1, 1, 0, 1, 1]] * 2)
    assert_same_leaves(cluster(x, 3, weights=weights.to(dtype)), cluster(x, 3, weights=weights.double()))


@both
def test_memory_layout_and_autocast_change_nothing(cluster: Any) -> None:
    x = randn(3, 12, 4, seed=12, dtype=torch.float32)
    expected = cluster(x, 4)
    for other in layouts(x):
        assert_same_leaves(cluster(other, 4), expected)
    assert_same_leaves(cluster(x[:1].expand(3, -1, -1), 4), cluster(x[:1].repeat(3, 1, 1), 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_leaves(cluster(x, 4), expected)


@both
@pytest.mark.parametrize("weighted", [False, True])
def test_compiles_to_one_graph(cluster: Any, weighted: bool) -> None:
    one_graph = compiled(cluster)
    for n in (12, 20):  # the second size makes the graph symbolic
        x = randn(2, n, 4, seed=16)
        options: dict[str, Any] = dict(weights=rand(2, n, seed=17)) if weighted else dict(metric="cosine")
        expected = cluster(x, 3, iterations=2, **options)
        assert_same_leaves(one_graph(x, 3, iterations=2, **options), expected)


@both
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_value_affects_only_its_image(cluster: Any, bad: float, checks_off: None) -> None:
    x = randn(2, 12, 4, seed=18)
    expected = cluster(x, 3)
    x[0, 3, 1] = bad
    result = cluster(x, 3)
    assert_result([part[1] for part in result], [part[1] for part in expected])
    assert ((result.assignment[0] >= 0) & (result.assignment[0] < 3)).all()
    if cluster is kmedoids:
        assert ((result.indices[0] >= 0) & (result.indices[0] < 12)).all()


@both
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 3)}, r"shape \(4, 3\); expected \(B, N, C\)"),
        ({"x": torch.zeros(1, 4, 3, dtype=torch.long)}, "floating type"),
        ({"k": -1}, "k=-1 is negative"),
        ({"iterations": -2}, "iterations=-2 is negative"),
        ({"weights": torch.ones(2, 3)}, r"weights have shape \(2, 3\); expected \(B, N\) = \(1, 4\)"),
        ({"metric": "manhattan"}, "metric='manhattan'"),
        ({"init": "distant"}, "'distinct'"),
    ],
)
def test_invalid_arguments(cluster: Any, change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(1, 4, 3), "k": 2}
    with pytest.raises(ValueError, match=message):
        cluster(**(arguments | change))


def test_kmeans_equals_scikit_learn() -> None:
    from sklearn.cluster import KMeans

    x = randn(1, 60, 5, seed=3) + 4 * randn(1, 4, 5, seed=4).repeat(1, 15, 1)
    weights = rand(1, 60, seed=5) + 0.1
    result = kmeans(x, 4, init=x[:, :4], weights=weights)
    oracle = KMeans(4, init=x[0, :4].numpy(), n_init=1, max_iter=3, tol=0)
    oracle.fit(x[0].numpy(), sample_weight=weights[0].numpy())
    assert_close(result.centres[0], oracle.cluster_centers_)
    assert result.assignment[0].tolist() == oracle.labels_.tolist()


@pytest.mark.parametrize("metric", METRICS)
def test_kmeans_keeps_the_centre_of_a_cluster_of_zero_weight(metric: Any) -> None:
    x = torch.cat([randn(1, 5, 3, seed=5) * 0.1 + 5, randn(1, 5, 3, seed=6) * 0.1 - 5], 1)
    centres = torch.tensor([[5.0, 5, 5], [-1, -5, -5], [50, -50, 50]], dtype=torch.float64)
    unchanged = F.normalize(centres, dim=1) if metric == "cosine" else centres
    weights = torch.tensor([[1.0] * 5 + [0.0] * 5])
    result = kmeans(x, 3, weights=weights, init=centres, metric=metric)
    assert result.assignment.tolist() == [[0] * 5 + [1] * 5]
    assert_close(result.centres[0, 1:], unchanged[1:])  # the second has no weight, the third no token


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kmeans_keeps_the_centre_of_directions_that_cancel(dtype: torch.dtype) -> None:
    """The mean of three directions at 120° is zero up to rounding, so it has no direction of its own."""
    angle = torch.tensor([0, 2 / 3 * torch.pi, 4 / 3 * torch.pi], dtype=dtype)
    x = torch.stack([angle.cos(), angle.sin()], 1).unsqueeze(0)
    result = kmeans(x, 1, init=torch.tensor([0]), iterations=1, metric="cosine")
    assert_close(result.centres[0, 0], [1.0, 0.0])


@pytest.mark.parametrize("metric", METRICS)
def test_kmeans_has_gradients(metric: Any) -> None:
    """Three bundles far apart, so that small steps change no assignment; the fourth cluster stays empty."""
    bundles = torch.eye(4, dtype=torch.float64)[:3].repeat(2, 1) * 5  # (6, 4)
    x = (bundles + 0.3 * randn(2, 6, 4, seed=13)).requires_grad_()
    centres = (torch.eye(4, dtype=torch.float64) * torch.tensor([5, 5, 5, -50])).requires_grad_()
    weights = (rand(2, 6, seed=14) + 0.5).requires_grad_()

    def function(x: Tensor, weights: Tensor, centres: Tensor) -> Tensor:
        return kmeans(x, 4, weights=weights, init=centres, iterations=2, metric=metric).centres

    assert torch.autograd.gradcheck(function, (x, weights, centres), fast_mode=True)


def test_tokens_at_the_medoids_have_gradients() -> None:
    x = randn(2, 12, 4, seed=16).requires_grad_()
    medoids = kmedoids(x, 3).indices
    take(x, medoids).sum().backward()
    assert x.grad is not None
    assert_close(x.grad[:, :, 0], torch.zeros(2, 12).scatter(1, medoids, 1.0))


@EXAMPLES
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(2, 30),
    k=st.integers(1, 12),
    distinct=st.integers(1, 6),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_equal_tokens_share_a_medoid(seed: int, n: int, k: int, distinct: int, dtype: torch.dtype) -> None:
    """Integers, so that products are exact whatever the order of summation."""
    x = randint(50, 1, distinct, 5, seed=seed).to(dtype)[:, randint(distinct, n, seed=seed + 1)]
    assignment = kmedoids(x, min(k, n - 1)).assignment[0]
    equal = (x.mT.unsqueeze(2) == x.mT.unsqueeze(3)).all(1)[0]  # (N, N)
    assert (assignment.unsqueeze(0) == assignment.unsqueeze(1))[equal].all()


def test_in_clusters_of_two_the_lower_index_is_the_medoid() -> None:
    """Both have the same cost, which requires distances that are symmetric to the bit."""
    x = randn(4, 40, 16, seed=3, dtype=torch.float32).repeat_interleave(2, 1)
    x += 1e-2 * randn(4, 80, 16, seed=4, dtype=torch.float32)  # forty pairs
    result = kmedoids(x, 40, init=torch.arange(1, 80, 2), iterations=1)
    assert result.indices.tolist() == [list(range(0, 80, 2))] * 4


def test_kmedoids_makes_no_tensor_larger_than_its_distances() -> None:
    x, weights = randn(2, 64, 8), rand(2, 64)
    with LargestTensor() as made:
        kmedoids(x, 16, weights=weights, iterations=1)
    assert made.numel == 2 * 64 * 64, made.operation
