from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visualtokens.ops import bipartite_merge, ungroup
from visualtokens.ops.matching import match, merge_count

from .helpers import EXAMPLES, assert_close, assert_same_leaves, compiled, layouts, rand, randint, randn


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def reference_one(
    x: np.ndarray, metric: np.ndarray, size: np.ndarray, r: int, protect: int
) -> tuple[list[np.ndarray], list[float], list[int]]:
    """One image: deal out, pair, take the r best pairs, merge, keep the order."""
    n = len(x)
    first = [i for i in range(protect, n) if (i - protect) % 2 == 0]
    second = [i for i in range(protect, n) if (i - protect) % 2 == 1]
    pairs = []
    for a in first:
        if second:
            similar = [cosine(metric[a], metric[b]) for b in second]
            pairs.append((max(similar), a, second[int(np.argmax(similar))]))
    pairs.sort(key=lambda pair: -pair[0])  # stable: on ties the lower token merges
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
        "x": randn(b, n, c, seed=seed),
        "r": draw(st.integers(0, n + 2)),
        "metric": randn(b, n, 3, seed=seed + 1) if draw(st.booleans()) else None,
        "size": randint(5, b, n, seed=seed + 2, low=1) if draw(st.booleans()) else None,
        "protect": draw(st.integers(0, 3)),
    }


def filled(problem: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """x, metric and size with their defaults filled in."""
    x = problem["x"]
    metric = x if problem["metric"] is None else problem["metric"]
    size = torch.ones(x.shape[:2]) if problem["size"] is None else problem["size"]
    return x, metric, size.double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@EXAMPLES
@given(problem=problems())
def test_equals_the_reference(dtype: torch.dtype, problem: dict[str, Any]) -> None:
    problem["x"] = problem["x"].to(dtype)
    x, metric, size = filled(problem)
    result = bipartite_merge(**problem)
    assert result.tokens.dtype == dtype
    for b in range(x.shape[0]):
        image = x[b].double().numpy(), metric[b].double().numpy(), size[b].numpy()
        tokens, total, assignment = reference_one(*image, problem["r"], problem["protect"])
        assert result.assignment[b].tolist() == assignment
        assert_close(result.tokens[b], np.stack(tokens))
        assert_close(result.size[b], total, dtype)


@EXAMPLES
@given(problem=problems())
def test_nothing_is_lost(problem: dict[str, Any]) -> None:
    """The sizes add up to the patches, and Σ size · token stays what it was."""
    x, _, size = filled(problem)
    result = bipartite_merge(**problem)
    assert_close(result.size.sum(1), size.sum(1))
    before = (size.unsqueeze(2) * x).sum(1)
    assert_close((result.size.unsqueeze(2) * result.tokens).sum(1), before)


@EXAMPLES
@given(problem=problems())
def test_shapes_and_protected_tokens(problem: dict[str, Any]) -> None:
    x, protect = problem["x"], problem["protect"]
    b, n, _ = x.shape
    result = bipartite_merge(**problem)
    free = max(n - protect, 0)
    removed = min(problem["r"], (free + 1) // 2) if free >= 2 else 0
    assert merge_count(n, problem["r"], protect) == removed
    assert result.tokens.shape == (b, n - removed, x.shape[2])
    shown = min(protect, n)
    assert_close(result.tokens[:, :shown], x[:, :shown])
    assert result.assignment[:, :shown].tolist() == [list(range(shown))] * b
    # every token that remains stands for at least one old one, and the kept ones stay in order
    for image in result.assignment.tolist():
        assert sorted(set(image)) == list(range(n - removed))
        second = image[protect + 1 :: 2]
        assert second == sorted(second)


@EXAMPLES
@given(problem=problems())
def test_ungroup_is_the_way_back(problem: dict[str, Any]) -> None:
    """Tokens that merged with nobody come back as they were, the others as their mean."""
    x = problem["x"]
    result = bipartite_merge(**problem)
    back = ungroup(result.tokens, result.assignment)
    assert back.shape == x.shape
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            group = (result.assignment[b] == result.assignment[b, i]).nonzero().flatten()
            if len(group) == 1:
                assert_close(back[b, i], x[b, i])
    assert torch.equal(bipartite_merge(**problem).tokens, result.tokens)


def test_repeated_merging_counts_patches() -> None:
    """Sizes handed on from block to block still count the first patches, and groupings compose."""
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
    """All tokens equal: the first of the first side go first, all to the first of the second side."""
    x = torch.ones(1, 8, 2)
    assert match(x, 2).tolist() == [[0, 0, 0, 1, 2, 3, 4, 5]]
    assert bipartite_merge(x, 2).size.tolist() == [[3, 1, 1, 1, 1, 1]]


def test_similar_tokens_merge_first() -> None:
    angle = torch.tensor([0.0, 1.0, 2.0, 2.1, 4.0, 4.4])
    x = torch.stack([angle.cos(), angle.sin()], 1).unsqueeze(0)
    assert bipartite_merge(x, 1).assignment.tolist() == [[0, 1, 2, 2, 3, 4]]
    assert bipartite_merge(x, 2).assignment.tolist() == [[0, 1, 2, 2, 3, 3]]
    assert bipartite_merge(x * torch.tensor([1, 9, 1, 50, 0.1, 1]).view(1, 6, 1), 1).assignment.tolist() == [
        [0, 1, 2, 2, 3, 4]
    ]


@pytest.mark.parametrize(("n", "protect"), [(1, 0), (2, 1), (2, 2), (3, 5)])
def test_tokens_without_partner_stay(n: int, protect: int) -> None:
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
    """Matched and averaged in float32; sizes count beyond the 256 at which bfloat16 stops."""
    x, size = randn(1, 10, 4, seed=2, dtype=dtype), randint(3000, 1, 10, seed=3, low=1)
    result = bipartite_merge(x, 4, size=size)
    image = x[0].double().numpy()
    tokens, total, assignment = reference_one(image, image, size[0].double().numpy(), 4, 0)
    assert result.tokens.dtype == dtype
    assert result.assignment[0].tolist() == assignment
    assert_close(result.tokens[0], np.stack(tokens))
    assert result.size[0].tolist() == total


def test_memory_layout_does_not_matter_and_images_are_independent() -> None:
    x = randn(3, 12, 4, seed=4)
    before, expected = x.clone(), bipartite_merge(x, 4)
    for _, other in layouts(x):
        assert_same_leaves(bipartite_merge(other, 4), expected)
    assert torch.equal(x, before)
    assert torch.equal(bipartite_merge(x.flip(0), 4).assignment, expected.assignment.flip(0))
    x[0, 3] = torch.nan
    assert_close(bipartite_merge(x, 4).tokens[1:], expected.tokens[1:])


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients(weighted: bool) -> None:
    x, metric = randn(2, 9, 3, seed=5).requires_grad_(), randn(2, 9, 3, seed=6)
    size = (rand(2, 9, seed=7) + 0.5) if weighted else None
    assert torch.autograd.gradcheck(
        lambda x: bipartite_merge(x, 3, metric=metric, size=size, protect=1).tokens, x
    )


def test_autocast_changes_nothing() -> None:
    x = randn(2, 300, 16, seed=8, dtype=torch.float32)
    expected = bipartite_merge(x, 70, protect=1)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_leaves(bipartite_merge(x, 70, protect=1), expected)


def test_compiles_to_one_graph() -> None:
    one_graph = compiled(bipartite_merge)
    for n in (12, 21):  # the second size makes the graph symbolic
        x, size = randn(2, n, 4, seed=9), rand(2, n, seed=10) + 1
        expected = bipartite_merge(x, 3, size=size, protect=1)
        assert_same_leaves(one_graph(x, 3, size=size, protect=1), expected)


def test_negative_r_is_named() -> None:
    with pytest.raises(ValueError, match="r=-1 is negative"):
        bipartite_merge(torch.zeros(1, 4, 2), -1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(protect=-1), "protect=-1 is negative"),
        (dict(size=torch.ones(5)), r"size has shape \(5,\); expected \(B, N\) = \(1, 5\)"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bipartite_merge(randn(1, 5, 3), 1, **options)
