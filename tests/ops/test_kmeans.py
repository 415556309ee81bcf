from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visualtokens.ops import kmeans

from .helpers import (
    EXAMPLES,
    MANY_EXAMPLES,
    assert_close,
    assert_same_leaves,
    compiled,
    layouts,
    rand,
    randint,
    randn,
)

METRICS = ("euclidean", "cosine")


def reference(
    x: Tensor, centres: Tensor, weights: Tensor | None, iterations: int, metric: str
) -> tuple[Tensor, Tensor]:
    """Eq. 14 and 15 word for word: one image, one token and one centre at a time, in float64."""
    all_centres, all_assignments = [], []
    for b in range(x.shape[0]):
        points, c = x[b].double().numpy(), centres[b].double().numpy().copy()
        w = np.ones(len(points)) if weights is None else weights[b].double().numpy()
        if metric == "cosine":
            points = np.stack([unit(p) for p in points])
            c = np.stack([unit(p) for p in c])
        for _ in range(iterations):
            a = [closest(p, c, metric) for p in points]
            for j in range(len(c)):
                members = [i for i in range(len(points)) if a[i] == j]
                if sum(w[i] for i in members) == 0:
                    continue
                mean = sum(w[i] * points[i] for i in members) / sum(w[i] for i in members)
                c[j] = unit(mean) if metric == "cosine" else mean
        all_centres.append(torch.from_numpy(c))
        all_assignments.append(torch.tensor([closest(p, c, metric) for p in points]))
    return torch.stack(all_centres), torch.stack(all_assignments)


def unit(v: np.ndarray) -> np.ndarray:
    return v / np.linalg.norm(v)


def closest(point: np.ndarray, centres: np.ndarray, metric: str) -> int:
    """The lowest index on ties, as `argmin` and `argmax` promise."""
    if metric == "cosine":
        return int(np.argmax([point @ c for c in centres]))
    return int(np.argmin([((point - c) ** 2).sum() for c in centres]))


def objective(x: Tensor, centres: Tensor, weights: Tensor, metric: str) -> Tensor:
    """Eq. 13, ``(B,)``; between unit vectors the squared distance is 2 − 2 cos."""
    if metric == "cosine":
        x = x / x.norm(dim=2, keepdim=True)
    distance = (x.unsqueeze(2) - centres.unsqueeze(1)).square().sum(3)  # (B, N, K)
    return (weights * distance.min(2).values).sum(1)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    b, n, c = draw(st.integers(1, 3)), draw(st.integers(2, 24)), draw(st.integers(1, 9))
    k, seed = draw(st.integers(1, n - 1)), draw(st.integers(0, 10_000))
    order = [torch.randperm(n, generator=torch.Generator().manual_seed(seed + i))[:k] for i in range(b)]
    # A third of the weights are zero, so that some clusters may have none.
    weights = rand(b, n, seed=seed + 1) * (rand(b, n, seed=seed + 2) > 0.3)
    return {
        "x": randn(b, n, c, seed=seed) + draw(st.sampled_from([0.0, 3.0])),
        "k": k,
        "init": torch.stack(order),
        "weights": weights if draw(st.booleans()) else None,
        "iterations": draw(st.integers(0, 4)),
        "metric": draw(st.sampled_from(METRICS if c > 1 else METRICS[:1])),
    }


def pick(x: Tensor, index: Tensor) -> Tensor:
    return torch.stack([x[b, index[b]] for b in range(len(x))])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@EXAMPLES
@given(problem=problems())
def test_equals_the_reference(dtype: torch.dtype, problem: dict[str, Any]) -> None:
    problem["x"] = problem["x"].to(dtype)
    result = kmeans(**problem)
    first = pick(problem["x"], problem["init"])
    centres, assignment = reference(
        problem["x"], first, problem["weights"], problem["iterations"], problem["metric"]
    )
    assert result.centres.dtype == dtype
    assert_close(result.centres, centres)
    assert torch.equal(result.assignment, assignment)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("iterations", [1, 3, 10])
def test_equals_scikit_learn(weighted: bool, iterations: int) -> None:
    from sklearn.cluster import KMeans

    x = randn(1, 60, 5, seed=3) + 4 * randn(1, 4, 5, seed=4).repeat(1, 15, 1)
    weights = rand(1, 60, seed=5) + 0.1 if weighted else None
    result = kmeans(x, 4, init=x[:, :4], weights=weights, iterations=iterations)
    oracle = KMeans(4, init=x[0, :4].numpy(), n_init=1, max_iter=iterations, tol=0)
    oracle.fit(x[0].numpy(), sample_weight=None if weights is None else weights[0].numpy())
    assert_close(result.centres[0], oracle.cluster_centers_)
    assert result.assignment[0].tolist() == oracle.labels_.tolist()


@EXAMPLES
@given(problem=problems())
def test_objective_never_rises(problem: dict[str, Any]) -> None:
    problem.pop("iterations")
    weights = problem["weights"] if problem["weights"] is not None else torch.ones(problem["x"].shape[:2])
    before = torch.full((problem["x"].shape[0],), torch.inf, dtype=torch.float64)
    for iterations in range(6):
        centres = kmeans(**problem, iterations=iterations).centres
        now = objective(problem["x"], centres, weights, problem["metric"])
        assert (now <= before + 1e-9).all()
        before = now


@EXAMPLES
@given(problem=problems())
def test_assignment_is_in_range_and_repeatable_and_inputs_stay(problem: dict[str, Any]) -> None:
    before = problem["x"].clone()
    first, second = kmeans(**problem), kmeans(**problem)
    assert torch.equal(first.centres, second.centres)
    assert torch.equal(first.assignment, second.assignment)
    assert first.assignment.dtype == torch.long
    assert ((first.assignment >= 0) & (first.assignment < problem["k"])).all()
    assert torch.equal(problem["x"], before)


@EXAMPLES
@given(problem=problems())
def test_images_do_not_influence_each_other(problem: dict[str, Any]) -> None:
    """Reversing the batch reverses the result, and each image alone gives the same as in the batch."""
    whole = kmeans(**problem)
    for i in range(problem["x"].shape[0]):
        one = dict(problem, x=problem["x"][i : i + 1], init=problem["init"][i : i + 1])
        one["weights"] = None if problem["weights"] is None else problem["weights"][i : i + 1]
        alone = kmeans(**one)
        assert_close(alone.centres[0], whole.centres[i])
        assert torch.equal(alone.assignment[0], whole.assignment[i])
    flipped = dict(problem, x=problem["x"].flip(0), init=problem["init"].flip(0))
    flipped["weights"] = None if problem["weights"] is None else problem["weights"].flip(0)
    assert torch.equal(kmeans(**flipped).assignment, whole.assignment.flip(0))


@EXAMPLES
@given(problem=problems())
def test_euclidean_does_not_see_shifts_and_rotations(problem: dict[str, Any]) -> None:
    problem["metric"] = "euclidean"
    x = problem.pop("x")
    c = x.shape[2]
    rotation = torch.linalg.qr(randn(c, c, seed=9)).Q
    offset = 100 * randn(c, seed=10)
    plain, moved = kmeans(x, **problem), kmeans(x @ rotation + offset, **problem)
    assert torch.equal(plain.assignment, moved.assignment)
    torch.testing.assert_close(plain.centres @ rotation + offset, moved.centres, rtol=1e-9, atol=1e-9)


def test_float32_survives_a_large_offset() -> None:
    x = randn(2, 50, 16, seed=1)
    near, far = kmeans(x.float(), 7), kmeans((x + 1000).float(), 7)
    assert (near.assignment == far.assignment).float().mean() >= 0.97
    assert (near.centres + 1000 - far.centres).abs().median() < 1e-3


@pytest.mark.parametrize("outlier", [0, 72, 97, 98, 195])
def test_float32_survives_an_outlier(outlier: int) -> None:
    """Vision transformers have single tokens of huge norm; they must not cost the others their digits."""
    x = randn(1, 196, 64, seed=19)
    x[0, outlier] *= 1000
    first = torch.arange(10, 20)
    exact, single = (kmeans(x.to(dtype), 10, init=first) for dtype in (torch.float64, torch.float32))
    assert (exact.assignment == single.assignment).double().mean() >= 0.99


@EXAMPLES
@given(problem=problems())
def test_cosine_does_not_see_the_length_of_a_token(problem: dict[str, Any]) -> None:
    problem["metric"] = "cosine"
    x = problem.pop("x")
    x = torch.cat([x, torch.ones_like(x[:, :, :1])], 2)  # at least two channels, no zero vectors
    stretched = x * (0.01 + 100 * rand(*x.shape[:2], 1, seed=11))
    plain, scaled = kmeans(x, **problem), kmeans(stretched, **problem)
    assert torch.equal(plain.assignment, scaled.assignment)
    assert_close(scaled.centres, plain.centres)
    assert_close(plain.centres.norm(dim=2), torch.ones(plain.centres.shape[:2]))


def test_equal_centres_tie_to_the_lowest_index() -> None:
    x = randn(2, 30, 6, seed=2)
    centres = randn(3, 6, seed=3).repeat(4, 1)  # every centre four times
    assert (kmeans(x, 12, init=centres, iterations=0).assignment < 3).all()


@MANY_EXAMPLES
@given(seed=st.integers(0, 10_000), n=st.integers(4, 12), k=st.integers(2, 3), c=st.integers(1, 2))
def test_exact_ties_go_to_the_lowest_index(seed: int, n: int, k: int, c: int) -> None:
    """Small whole numbers have exact distances, so here a tie is a tie and not a rounding."""
    x, centres = randint(4, 1, n, c, seed=seed).double(), randint(4, 1, k, c, seed=seed + 1).double()
    expected = reference(x, centres, None, 0, "euclidean")[1]
    assert kmeans(x, k, init=centres, iterations=0).assignment.tolist() == expected.tolist()


@pytest.mark.parametrize("metric", METRICS)
def test_empty_cluster_keeps_its_centre(metric: Any) -> None:
    x = randn(1, 20, 3, seed=4) * 0.1 + torch.tensor([1.0, 1, 1])
    far = torch.tensor([[0.0, 0, -1]], dtype=torch.float64)
    result = kmeans(x, 2, init=torch.cat([x[0, :1], far]), metric=metric)
    assert (result.assignment == 0).all()
    assert_close(result.centres[0, 1], far[0])


@pytest.mark.parametrize("metric", METRICS)
def test_weightless_cluster_keeps_its_centre(metric: Any) -> None:
    """Not 0/0: the tokens are there, but count for nothing."""
    x = torch.cat([randn(1, 5, 3, seed=5) * 0.1 + 5, randn(1, 5, 3, seed=6) * 0.1 - 5], 1)
    weights = torch.tensor([[1.0] * 5 + [0.0] * 5])
    init = torch.tensor([0, 7])
    result = kmeans(x, 2, weights=weights, init=init, metric=metric)
    expected = reference(x, x[:, init], weights, 3, metric)
    assert_close(result.centres, expected[0])
    assert result.assignment.tolist() == [[0] * 5 + [1] * 5]
    nobody = kmeans(x, 2, weights=torch.zeros(1, 10), init=init, metric=metric)
    assert_close(nobody.centres, reference(x, x[:, init], None, 0, metric)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_directions_that_cancel_keep_the_centre(dtype: torch.dtype) -> None:
    """Three directions at 120°: their mean is zero up to rounding, so it has no direction of its own."""
    angle = torch.tensor([0, 2 / 3 * torch.pi, 4 / 3 * torch.pi], dtype=dtype)
    x = torch.stack([angle.cos(), angle.sin()], 1).unsqueeze(0)
    result = kmeans(x, 1, init=torch.tensor([0]), iterations=1, metric="cosine")
    assert_close(result.centres[0, 0], [1.0, 0.0])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("k", [5, 6, 100])
def test_as_many_clusters_as_tokens(k: int, metric: Any) -> None:
    x = randn(2, 5, 3, seed=7)
    result = kmeans(x, k, metric=metric)
    assert_close(result.centres, x if metric == "euclidean" else x / x.norm(dim=2, keepdim=True))
    assert result.assignment.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_no_cluster_and_one_cluster_and_no_image() -> None:
    x = randn(2, 5, 3, seed=8)
    none = kmeans(x, 0)
    assert none.centres.shape == (2, 0, 3)
    assert none.assignment.tolist() == [[-1] * 5] * 2
    one = kmeans(x, 1)
    assert_close(one.centres[:, 0], x.mean(1))
    assert (one.assignment == 0).all()
    single = kmeans(x[:, :1], 1)
    assert_close(single.centres, x[:, :1])
    empty = kmeans(x[:0], 2)
    assert empty.centres.shape == (0, 2, 3)
    assert empty.assignment.shape == (0, 5)


@pytest.mark.parametrize("metric", METRICS)
def test_all_tokens_equal(metric: Any) -> None:
    x = torch.full((1, 9, 4), 0.3, dtype=torch.float64)
    result = kmeans(x, 3, metric=metric)
    assert_close(result.centres, x[:, :3] if metric == "euclidean" else torch.full((1, 3, 4), 0.5))
    assert (result.assignment == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("metric", METRICS)
def test_low_precision_tokens_are_clustered_in_float32(dtype: torch.dtype, metric: Any) -> None:
    x = randn(1, 300, 8, seed=9, dtype=dtype)
    weights = rand(1, 300, seed=10, dtype=dtype)
    result = kmeans(x, 12, weights=weights, metric=metric, init=torch.arange(12), iterations=2)
    centres, assignment = reference(x, x[:, :12], weights, 2, metric)
    assert result.centres.dtype == dtype
    assert_close(result.centres, centres)
    assert torch.equal(result.assignment, assignment)


@pytest.mark.parametrize("weight_dtype", [torch.float64, torch.int64, torch.bool])
def test_weights_of_any_type(weight_dtype: torch.dtype) -> None:
    """Counts and masks are weights as well as scores are."""
    x = randn(2, 10, 3, seed=11)
    weights = torch.tensor([[1, 0, 1, 1, 0, 1, 1, 0, 1, 1]] * 2)
    expected = kmeans(x, 3, weights=weights.double())
    assert_same_leaves(kmeans(x, 3, weights=weights.to(weight_dtype)), expected)


@pytest.mark.parametrize("metric", METRICS)
def test_memory_layout_does_not_matter(metric: Any) -> None:
    x = randn(3, 12, 4, seed=12)
    expected = kmeans(x, 4, metric=metric)
    for _, other in layouts(x):
        assert_same_leaves(kmeans(other, 4, metric=metric), expected)
    expanded = x[:1].expand(3, -1, -1)
    assert_same_leaves(kmeans(expanded, 4, metric=metric), kmeans(expanded.clone(), 4, metric=metric))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_gradients(metric: Any, iterations: int) -> None:
    """Three bundles far apart, so that small steps move no token; a fourth centre that stays empty."""
    bundles = torch.eye(4, dtype=torch.float64)[:3].repeat(3, 1) * 5  # (9, 4)
    x = (bundles + 0.3 * randn(2, 9, 4, seed=13)).requires_grad_()
    centres = (torch.eye(4, dtype=torch.float64) * torch.tensor([5, 5, 5, -50])).requires_grad_()
    weights = (rand(2, 9, seed=14) + 0.5).requires_grad_()

    def function(x: Tensor, weights: Tensor, centres: Tensor) -> Tensor:
        return kmeans(x, 4, weights=weights, init=centres, iterations=iterations, metric=metric).centres

    assert torch.autograd.gradcheck(function, (x, weights, centres))


def test_autocast_changes_nothing() -> None:
    x = randn(2, 500, 16, seed=15, dtype=torch.float32)
    expected = kmeans(x, 20)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_leaves(kmeans(x, 20), expected)


@pytest.mark.parametrize(
    ("metric", "weighted"), [("euclidean", False), ("cosine", False), ("euclidean", True)]
)
def test_compiles_to_one_graph(metric: Any, weighted: bool) -> None:
    one_graph = compiled(kmeans)
    for n in (12, 20):  # the second size makes the graph symbolic
        x = randn(2, n, 4, seed=16)
        call = {"weights": rand(2, n, seed=17) if weighted else None, "metric": metric, "iterations": 2}
        assert_same_leaves(one_graph(x, 3, **call), kmeans(x, 3, **call))


def test_a_nan_spoils_its_own_image_only(checks_off: None) -> None:
    x = randn(2, 12, 4, seed=18)
    expected = kmeans(x, 3)
    x[0, 3, 1] = torch.nan
    result = kmeans(x, 3)
    assert_close(result.centres[1], expected.centres[1])
    assert torch.equal(result.assignment[1], expected.assignment[1])
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
        kmeans(**(arguments | change))
