"""Merging against loops over tokens, and what it must conserve."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visualtokens.ops import bipartite_merge, nearest_merge, ungroup
from visualtokens.ops.matching import ROUND_SHARE, ROUND_TOKENS, merge_count

from .helpers import EXAMPLES, assert_close, assert_same_leaves, compiled, layouts, rand, randint, randn


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def reference_one(
    x: np.ndarray, metric: np.ndarray, size: np.ndarray, r: int, protect: int
) -> tuple[list[np.ndarray], list[float], list[int]]:
    """One image: split in two sets, pair, merge the r best pairs, keep the order."""
    n = len(x)
    first = [i for i in range(protect, n) if (i - protect) % 2 == 0]
    second = [i for i in range(protect, n) if (i - protect) % 2 == 1]
    pairs = []
    for a in first:
        if second:
            similar = [cosine(metric[a], metric[b]) for b in second]
            pairs.append((max(similar), a, second[int(np.argmax(similar))]))
    pairs.sort(key=lambda pair: -pair[0])  # stable: on ties the lower index merges
    target = {a: b for _, a, b in pairs[:r]}
    kept = [i for i in range(n) if i not in target]
    members = {i: [i] + [a for a in target if target[a] == i] for i in kept}
    total = [sum(size[m] for m in members[i]) for i in kept]
    tokens = [sum(size[m] * x[m] for m in members[i]) / t for i, t in zip(kept, total, strict=True)]
    return tokens, total, [kept.index(target.get(i, i)) for i in range(n)]


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    b, n, c = draw(st.integers(1, 3)), draw(st.integers(1, 16)), draw(st.integers(2, 6))
    seed = draw(st.integers(0, 10_000))
    return {
        "x": randn(b, n, c, seed=seed, dtype=draw(st.sampled_from([torch.float64, torch.float32]))),
        "r": draw(st.integers(0, n + 2)),
        "metric": randn(b, n, 3, seed=seed + 1) if draw(st.booleans()) else None,
        "size": randint(5, b, n, seed=seed + 2, low=1) if draw(st.booleans()) else None,
        "protect": draw(st.integers(0, 3)),
    }


def with_defaults(problem: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """x, metric and size."""
    x = problem["x"]
    metric = x if problem["metric"] is None else problem["metric"]
    size = torch.ones(x.shape[:2]) if problem["size"] is None else problem["size"]
    return x, metric, size.double()


@EXAMPLES
@given(problem=problems())
def test_equals_the_reference(problem: dict[str, Any]) -> None:
    x, metric, size = with_defaults(problem)
    result = bipartite_merge(**problem)
    assert result.tokens.dtype == x.dtype
    for b in range(x.shape[0]):
        image = x[b].double().numpy(), metric[b].double().numpy(), size[b].numpy()
        tokens, total, assignment = reference_one(*image, problem["r"], problem["protect"])
        assert result.assignment[b].tolist() == assignment
        assert_close(result.tokens[b], np.stack(tokens))
        assert_close(result.size[b], total, x.dtype)


@EXAMPLES
@given(problem=problems())
def test_properties(problem: dict[str, Any]) -> None:
    """Σ size · token is conserved, protected tokens are untouched, and kept tokens stay in order."""
    x, _, size = with_defaults(problem)
    n = x.shape[1]
    result = bipartite_merge(**problem)
    before = (size.unsqueeze(2) * x.double()).sum(1)
    assert_close((result.size.unsqueeze(2) * result.tokens).sum(1), before, x.dtype)
    protect = min(problem["protect"], n)
    removed = merge_count(n, problem["r"], problem["protect"])
    assert result.tokens.shape[1] == n - removed
    assert_close(result.tokens[:, :protect], x[:, :protect])
    for image in result.assignment.tolist():
        assert image[:protect] == list(range(protect))
        assert sorted(set(image)) == list(range(n - removed))
        second_set = image[protect + 1 :: 2]
        assert second_set == sorted(second_set)


def test_ungroup_restores_tokens_that_did_not_merge() -> None:
    x = randn(2, 12, 4)
    result = bipartite_merge(x, 3)
    single = (result.size == 1).gather(1, result.assignment)  # (B, N)
    assert single.sum() >= 12  # three pairs are at most six tokens of each image
    assert_close(ungroup(result.tokens, result.assignment)[single], x[single])


def test_repeated_merging_counts_patches() -> None:
    """Sizes passed from block to block count the original patches, and assignments compose."""
    x = randn(2, 33, 4, seed=1)
    tokens, size, assignment = x, torch.ones(2, 33, dtype=torch.float64), torch.arange(33).expand(2, 33)
    for _ in range(4):
        merged = bipartite_merge(tokens, 5, size=size, protect=1)
        tokens, size = merged.tokens, merged.size
        assignment = merged.assignment.gather(1, assignment)
    assert tokens.shape[1] == 13
    counts = torch.stack([torch.bincount(image, minlength=13) for image in assignment])
    assert_close(size, counts)
    for b in range(2):
        for j in range(13):
            assert_close(tokens[b, j], x[b, assignment[b] == j].mean(0))


def test_ties_merge_the_lower_token_into_the_lower_partner() -> None:
    """All tokens equal: the first two of the first set merge into the first of the second set."""
    result = bipartite_merge(torch.ones(1, 8, 2), 2)
    assert result.assignment.tolist() == [[0, 0, 0, 1, 2, 3, 4, 5]]
    assert result.size.tolist() == [[3, 1, 1, 1, 1, 1]]


def test_similar_directions_merge_first() -> None:
    angle = torch.tensor([0.0, 1.0, 2.0, 2.1, 4.0, 4.4])
    x = torch.stack([angle.cos(), angle.sin()], 1).unsqueeze(0)
    lengths = torch.tensor([1, 9, 1, 50, 0.1, 1]).view(1, 6, 1)
    for tokens in (x, x * lengths):
        assert bipartite_merge(tokens, 1).assignment.tolist() == [[0, 1, 2, 2, 3, 4]]
        assert bipartite_merge(tokens, 2).assignment.tolist() == [[0, 1, 2, 2, 3, 3]]


@pytest.mark.parametrize(("n", "protect"), [(1, 0), (2, 1), (2, 2), (3, 5)])
def test_tokens_without_partner_are_kept(n: int, protect: int) -> None:
    x = randn(2, n, 3)
    result = bipartite_merge(x, 9, protect=protect)
    assert_close(result.tokens, x)
    assert result.assignment.tolist() == [list(range(n))] * 2


def test_merging_nothing_and_no_image() -> None:
    x = randn(2, 7, 3)
    result = bipartite_merge(x, 0)
    assert torch.equal(result.tokens, x)
    assert result.size.tolist() == [[1.0] * 7] * 2
    assert bipartite_merge(x[:0], 3).tokens.shape == (0, 4, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_tokens(dtype: torch.dtype) -> None:
    """Matched and averaged in float32; bfloat16 could not count sizes above 256."""
    x, size = randn(1, 10, 4, seed=2, dtype=dtype), randint(3000, 1, 10, seed=3, low=1)
    result = bipartite_merge(x, 4, size=size)
    image = x[0].double().numpy()
    tokens, total, assignment = reference_one(image, image, size[0].double().numpy(), 4, 0)
    assert result.tokens.dtype == dtype
    assert result.assignment[0].tolist() == assignment
    assert_close(result.tokens[0], np.stack(tokens))
    assert result.size[0].tolist() == total


def test_memory_layout_and_autocast_change_nothing_and_images_are_independent() -> None:
    x = randn(3, 12, 4, seed=4, dtype=torch.float32)
    before, expected = x.clone(), bipartite_merge(x, 4)
    for other in layouts(x):
        assert_same_leaves(bipartite_merge(other, 4), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_leaves(bipartite_merge(x, 4), expected)
    assert torch.equal(x, before)
    x[0, 3] = torch.nan
    assert_same_leaves([part[1:] for part in bipartite_merge(x, 4)], [part[1:] for part in expected])


def test_gradients() -> None:
    x, metric, size = (
        randn(2, 9, 3, seed=5).requires_grad_(),
        randn(2, 9, 3, seed=6),
        rand(2, 9, seed=7) + 0.5,
    )
    assert torch.autograd.gradcheck(
        lambda x: bipartite_merge(x, 3, metric=metric, size=size, protect=1).tokens, x, fast_mode=True
    )


def test_compiles_to_one_graph() -> None:
    one_graph = compiled(bipartite_merge)
    for n in (12, 21):  # the second size makes the graph symbolic
        x, size = randn(2, n, 4, seed=9), rand(2, n, seed=10) + 1
        expected = bipartite_merge(x, 3, size=size, protect=1)
        assert_same_leaves(one_graph(x, 3, size=size, protect=1), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(r=-1), "r=-1 is negative"),
        (dict(protect=-1), "protect=-1 is negative"),
        (dict(size=torch.ones(5)), r"size has shape \(5,\); expected \(B, N\) = \(1, 5\)"),
    ],
)
def test_invalid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bipartite_merge(randn(1, 5, 3), **(dict(r=1) | options))


# Merging by what each token costs to lose.


def kept_and_assigned(metric: np.ndarray, w: np.ndarray, k: int) -> tuple[list[int], list[int]]:
    """One image: drop the cheapest tokens round by round; the nearest kept token of each token."""
    distance = np.linalg.norm(metric[:, None] - metric[None], axis=2)
    kept = list(range(len(metric)))
    while len(kept) > k:
        cost = {}
        nearest = {i: sorted((j for j in kept if j != i), key=lambda j, i=i: distance[i, j]) for i in kept}
        first = {i: w[i] * distance[i, nearest[i][0]] for i in kept}
        for i in kept:
            blocked = first[i] > first[nearest[i][0]]
            second = nearest[i][1:2]
            cost[i] = first[i] if not blocked else (w[i] * distance[i, second[0]] if second else np.inf)
        stay = max(k, len(kept) - max(ROUND_TOKENS, int(len(kept) * ROUND_SHARE)))
        kept = sorted(sorted(kept, key=lambda i: -cost[i])[:stay])
    nearest_kept = [int(np.argmin([distance[i, j] for j in kept])) for i in range(len(metric))]
    return kept, [kept.index(i) if i in kept else nearest_kept[i] for i in range(len(metric))]


@given(st.integers(1, 3), st.integers(2, 48), st.data())
def test_nearest_merge_is_that_of_a_loop(b: int, n: int, data: st.DataObject) -> None:
    k, seed = data.draw(st.integers(1, n)), data.draw(st.integers(0, 10_000))
    x, metric = randn(b, n, 5, seed=seed, dtype=torch.float64), randn(b, n, 3, seed=seed + 1)
    weights, size = rand(b, n, seed=seed + 2) + 0.1, randint(5, b, n, seed=seed + 3, low=1)
    found = nearest_merge(x, k, metric=metric, weights=weights, size=size)
    for image in range(b):
        values, w = x[image].numpy(), weights[image].double().numpy()
        kept, assigned = kept_and_assigned(metric[image].double().numpy(), w, k)
        assert found.assignment[image].tolist() == assigned
        for j in range(len(kept)):
            members = [i for i in range(n) if assigned[i] == j]
            mean = np.average(values[members], axis=0, weights=w[members])
            length = np.average(np.linalg.norm(values[members], axis=1), weights=w[members])
            expected = values[kept[j]] if k == n else mean / np.linalg.norm(mean) * length
            assert_close(found.tokens[image, j], torch.from_numpy(expected), torch.float32)
            assert found.size[image, j].item() == size[image][members].sum().item()


def test_equal_tokens_merge_without_loss_and_significant_ones_stay() -> None:
    distinct = randn(1, 6, 8)
    x = distinct[:, [0, 1, 2, 3, 4, 5, 0, 2, 4]]  # three tokens twice
    found = nearest_merge(x, 6)
    assert_close(ungroup(found.tokens, found.assignment), x)
    assert sorted(found.size[0].tolist()) == [1, 1, 1, 2, 2, 2]
    significant = torch.full((1, 9), 1e-3)
    significant[0, [3, 7]] = 1e6
    few = nearest_merge(x, 2, weights=significant)
    torch.testing.assert_close(few.tokens[0], x[0, [3, 7]], rtol=1e-4, atol=1e-4)


def test_nearest_merge_compiles_and_needs_a_token() -> None:
    x = randn(2, 12, 4)
    expected = nearest_merge(x, 5)
    assert_same_leaves(compiled(lambda: nearest_merge(x, 5))(), expected)
    with pytest.raises(ValueError, match="k=0; at least one token must stay"):
        nearest_merge(x, 0)
