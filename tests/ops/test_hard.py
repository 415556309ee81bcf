from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visualtokens.ops import group_mean, group_sum, take, ungroup

from .helpers import (
    EXAMPLES,
    LargestTensor,
    assert_close,
    assert_same_leaves,
    compiled,
    layouts,
    rand,
    randint,
    randn,
)


def reference_sum(x: Tensor, assignment: Tensor, k: int) -> list[list[list[float]]]:
    """Every patch adds its row to that of its group, one number at a time."""
    b, n, c = x.shape
    out = [[[0.0] * c for _ in range(k)] for _ in range(b)]
    for image in range(b):
        for i in range(n):
            group = int(assignment[image, i])
            if group >= 0:
                for channel in range(c):
                    out[image][group][channel] += float(x[image, i, channel])
    return out


def reference_mean(x: Tensor, assignment: Tensor, k: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    b, n, c = x.shape
    mean, total = torch.zeros(b, k, c, dtype=torch.float64), torch.zeros(b, k, dtype=torch.float64)
    for image in range(b):
        for j in range(k):
            members = [i for i in range(n) if int(assignment[image, i]) == j]
            weight = sum(float(weights[image, i]) for i in members)
            total[image, j] = weight
            if weight > 0:
                rows = [float(weights[image, i]) * x[image, i].double() for i in members]
                mean[image, j] = torch.stack(rows).sum(0) / weight
    return mean, total


SIZES = {
    "b": st.integers(1, 3),
    "n": st.integers(1, 20),
    "c": st.integers(1, 6),
    "k": st.integers(0, 7),
    "seed": st.integers(0, 10_000),
}


def some_assignment(b: int, n: int, k: int, seed: int) -> Tensor:
    """Between -1 (nobody) and K − 1."""
    return randint(k, b, n, seed=seed, low=-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@EXAMPLES
@given(**SIZES)
def test_sum_equals_the_reference(dtype: torch.dtype, b: int, n: int, c: int, k: int, seed: int) -> None:
    x, assignment = randn(b, n, c, seed=seed, dtype=dtype), some_assignment(b, n, k, seed)
    result = group_sum(x, assignment, k)
    assert result.shape == (b, k, c)
    assert result.dtype == dtype
    if k:
        assert_close(result, reference_sum(x, assignment, k))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@EXAMPLES
@given(**SIZES)
def test_mean_equals_the_reference(
    dtype: torch.dtype, weighted: bool, b: int, n: int, c: int, k: int, seed: int
) -> None:
    """A third of the weights are zero: groups may have members but no weight."""
    x, assignment = randn(b, n, c, seed=seed, dtype=dtype), some_assignment(b, n, k, seed)
    weights = rand(b, n, seed=seed + 1) * (rand(b, n, seed=seed + 2) > 0.3)
    expected = reference_mean(x, assignment, k, weights if weighted else torch.ones(b, n))
    mean, total = group_mean(x, assignment, k, weights=weights if weighted else None)
    assert_close(mean, expected[0], dtype)
    assert_close(total, expected[1], dtype)


@EXAMPLES
@given(**SIZES)
def test_ungroup_copies_each_token_to_its_patches(b: int, n: int, c: int, k: int, seed: int) -> None:
    tokens, assignment = randn(b, k, c, seed=seed), some_assignment(b, n, k, seed)
    result = ungroup(tokens, assignment)
    assert result.shape == (b, n, c)
    for image in range(b):
        for i in range(n):
            group = int(assignment[image, i])
            expected = tokens[image, group] if group >= 0 else torch.zeros(c, dtype=torch.float64)
            assert torch.equal(result[image, i], expected)


@EXAMPLES
@given(**SIZES)
def test_take_equals_plain_indexing(b: int, n: int, c: int, k: int, seed: int) -> None:
    x, index = randn(b, n, c, seed=seed), randint(n, b, k, seed=seed)
    result = take(x, index)
    assert result.shape == (b, k, c)
    for image in range(b):
        assert torch.equal(result[image], x[image, index[image]])


@EXAMPLES
@given(**SIZES)
def test_ungroup_is_the_transpose_of_group_sum(b: int, n: int, c: int, k: int, seed: int) -> None:
    """⟨group_sum(x), t⟩ = ⟨x, ungroup(t)⟩, whatever x and t."""
    x, tokens = randn(b, n, c, seed=seed), randn(b, k, c, seed=seed + 1)
    assignment = some_assignment(b, n, k, seed)
    left = (group_sum(x, assignment, k) * tokens).sum()
    right = (x * ungroup(tokens, assignment)).sum()
    assert_close(left, right)


@EXAMPLES
@given(**SIZES)
def test_the_mean_of_copies_is_the_token(b: int, n: int, c: int, k: int, seed: int) -> None:
    tokens, assignment = randn(b, k, c, seed=seed), some_assignment(b, n, k, seed)
    mean, total = group_mean(ungroup(tokens, assignment), assignment, k)
    assert_close(mean, tokens * (total > 0).unsqueeze(2))


def test_groups_of_nobody() -> None:
    x = randn(2, 5, 3)
    nobody = torch.full((2, 5), -1)
    assert not group_sum(x, nobody, 4).any()
    mean, total = group_mean(x, nobody, 4)
    assert not mean.any()
    assert not total.any()
    assert not ungroup(randn(2, 4, 3), nobody).any()
    assert group_sum(x, nobody, 0).shape == (2, 0, 3)
    assert group_mean(x, nobody, 0)[1].shape == (2, 0)
    assert ungroup(randn(2, 0, 3), nobody).shape == (2, 5, 3)


def test_no_image() -> None:
    x, assignment = torch.zeros(0, 5, 3), torch.zeros(0, 5, dtype=torch.long)
    assert group_sum(x, assignment, 4).shape == (0, 4, 3)
    assert group_mean(x, assignment, 4)[0].shape == (0, 4, 3)
    assert ungroup(torch.zeros(0, 4, 3), assignment).shape == (0, 5, 3)
    assert take(torch.zeros(0, 9, 3), assignment).shape == (0, 5, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_groups_in_low_precision(dtype: torch.dtype) -> None:
    """A running bfloat16 count would stop at 256, a float16 one at 2048."""
    n = 5000
    x = rand(1, n, 3, seed=1, dtype=dtype)
    mean, total = group_mean(x, torch.zeros(1, n, dtype=torch.long), 1)
    assert_close(mean[0, 0], x[0].double().mean(0), dtype)
    assert_close(total / n, torch.ones(1, 1), dtype)
    weights = rand(1, n, seed=2, dtype=dtype)
    mean, _ = group_mean(x, torch.zeros(1, n, dtype=torch.long), 1, weights=weights)
    w = weights[0].double().unsqueeze(1)
    assert_close(mean[0, 0], (w * x[0].double()).sum(0) / w.sum(), dtype)


def test_memory_layout_does_not_matter_and_inputs_stay() -> None:
    x, assignment = randn(3, 12, 4, seed=3), some_assignment(3, 12, 5, 3)
    before = x.clone()
    for _, other in layouts(x):
        assert_close(group_sum(other, assignment, 5), group_sum(x, assignment, 5))
        assert_close(ungroup(other, assignment), ungroup(x, assignment))
        assert torch.equal(take(other, assignment.abs()), take(x, assignment.abs()))
    shared = assignment[:1].expand(3, 12)
    assert_close(group_sum(x, shared, 5), group_sum(x, shared.clone(), 5))
    assert_close(ungroup(x, shared), ungroup(x, shared.clone()))
    assert torch.equal(x, before)


def test_images_do_not_influence_each_other() -> None:
    x, assignment = randn(3, 12, 4, seed=4), some_assignment(3, 12, 5, 4)
    assert_close(group_sum(x.flip(0), assignment.flip(0), 5), group_sum(x, assignment, 5).flip(0))
    x[0] = torch.nan
    assert torch.isfinite(group_mean(x, assignment, 5)[0][1:]).all()


def test_gradients() -> None:
    x = randn(2, 7, 3, seed=5).requires_grad_()
    weights = (rand(2, 7, seed=6) + 0.1).requires_grad_()
    tokens = randn(2, 4, 3, seed=7).requires_grad_()
    assignment = torch.tensor([[0, 1, -1, 1, 3, 3, 0], [2, 2, 2, 2, -1, 0, 1]])
    assert torch.autograd.gradcheck(lambda x: group_sum(x, assignment, 4), x)
    assert torch.autograd.gradcheck(lambda x, w: group_mean(x, assignment, 4, weights=w), (x, weights))
    assert torch.autograd.gradcheck(lambda t: ungroup(t, assignment), tokens)
    assert torch.autograd.gradcheck(lambda x: take(x, torch.tensor([[6, 0, 6], [1, 2, 3]])), x)


def test_gradients_of_weightless_groups_are_finite() -> None:
    x, weights = randn(1, 4, 2).requires_grad_(), torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    group_mean(x, torch.tensor([[0, 0, 2, 2]]), 3, weights=weights)[0].sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert weights.grad is not None
    assert torch.isfinite(weights.grad).all()


def test_no_one_hot_product_is_made() -> None:
    x, assignment = randn(1, 300, 4), some_assignment(1, 300, 100, 0)
    with LargestTensor() as largest:
        group_mean(x, assignment, 100)
    assert largest.numel == 300 * 4, largest.operation


def test_compile_to_one_graph_each() -> None:
    x, assignment, weights = randn(2, 9, 4, seed=8), some_assignment(2, 9, 5, 8), rand(2, 9, seed=9)
    assert_same_leaves(compiled(group_sum)(x, assignment, 5), group_sum(x, assignment, 5))
    expected = group_mean(x, assignment, 5, weights=weights)
    assert_same_leaves(compiled(group_mean)(x, assignment, 5, weights=weights), expected)
    assert_same_leaves(compiled(ungroup)(x, assignment), ungroup(x, assignment))
    assert_same_leaves(compiled(take)(x, assignment.abs()), take(x, assignment.abs()))


def test_autocast_changes_nothing() -> None:
    x, assignment = randn(2, 30, 4, seed=10, dtype=torch.float32), some_assignment(2, 30, 5, 10)
    weights = rand(2, 30, seed=11, dtype=torch.float32)
    expected = group_mean(x, assignment, 5, weights=weights)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_leaves(group_mean(x, assignment, 5, weights=weights), expected)
        assert_same_leaves(ungroup(x, assignment), ungroup(x, assignment))


def test_an_index_of_another_image_is_found_on_request(checks_on: None) -> None:
    x = randn(2, 3, 4)
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=rf"take: index is {wrong} at \(1, 0\); expected 0 to 2"):
            take(x, torch.tensor([[0], [wrong]]))
    with pytest.raises(ValueError, match=r"group_sum: assignment is 2 at \(0, 1\); expected -1 to 1"):
        group_sum(x, torch.tensor([[0, 2, -1], [0, 0, 0]]), 2)
