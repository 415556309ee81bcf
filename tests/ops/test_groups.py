"""Hard and soft grouping against loops, and the identities that tie the operations together."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visualtokens.ops import assign_soft, gather, group_mean, group_sum, scatter, take, ungroup

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

Over = Literal["patches", "groups"]
SIZES = {
    "b": st.integers(1, 3),
    "n": st.integers(1, 12),
    "c": st.integers(1, 5),
    "k": st.integers(0, 7),
    "seed": st.integers(0, 10_000),
}
DTYPES = st.sampled_from([torch.float64, torch.float32])


def random_assignment(b: int, n: int, k: int, seed: int) -> Tensor:
    """Indices from -1 (unassigned) to K − 1."""
    return randint(k, b, n, seed=seed, low=-1)


def reference_mean(x: Tensor, assignment: Tensor, k: int, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum, weighted mean and total weight of each group."""
    b, n, c = x.shape
    sums, total = torch.zeros(b, k, c, dtype=torch.float64), torch.zeros(b, k, dtype=torch.float64)
    for image in range(b):
        for i in range(n):
            j = int(assignment[image, i])
            if j >= 0:
                sums[image, j] += float(weights[image, i]) * x[image, i].double()
                total[image, j] += float(weights[image, i])
    mean = torch.where(total.unsqueeze(2) > 0, sums / total.unsqueeze(2), 0)
    return sums, mean, total


@EXAMPLES
@given(**SIZES, dtype=DTYPES)
def test_sum_and_mean_equal_the_reference(
    b: int, n: int, c: int, k: int, seed: int, dtype: torch.dtype
) -> None:
    """A third of the weights are zero: a group may have members but no weight."""
    x, assignment = randn(b, n, c, seed=seed, dtype=dtype), random_assignment(b, n, k, seed)
    ones, weights = torch.ones(b, n), rand(b, n, seed=seed + 1) * (rand(b, n, seed=seed + 2) > 0.3)
    sums, mean, total = reference_mean(x, assignment, k, ones)
    assert_close(group_sum(x, assignment, k), sums, dtype)
    assert_same_leaves(group_mean(x, assignment, k), (mean.to(dtype), total.to(dtype)))
    _, mean, total = reference_mean(x, assignment, k, weights)
    assert_same_leaves(group_mean(x, assignment, k, weights=weights), (mean.to(dtype), total.to(dtype)))


@EXAMPLES
@given(**SIZES)
def test_take_and_ungroup_equal_indexing(b: int, n: int, c: int, k: int, seed: int) -> None:
    x, index = randn(b, n, c, seed=seed), randint(n, b, k, seed=seed)
    tokens, assignment = randn(b, k, c, seed=seed), random_assignment(b, n, k, seed)
    for image in range(b):
        assert torch.equal(take(x, index)[image], x[image, index[image]])
        padded = torch.cat((tokens[image], torch.zeros(1, c)))  # row -1 for unassigned patches
        assert torch.equal(ungroup(tokens, assignment)[image], padded[assignment[image]])


@EXAMPLES
@given(**SIZES)
def test_backward_operations_are_transposes(b: int, n: int, c: int, k: int, seed: int) -> None:
    """⟨group(x), t⟩ = ⟨x, ungroup(t)⟩ for any x and t, hard and soft."""
    x, tokens = randn(b, n, c, seed=seed), randn(b, k, c, seed=seed + 1)
    assignment, weights = random_assignment(b, n, k, seed), rand(b, n, k, seed=seed + 2)
    hard = (group_sum(x, assignment, k) * tokens).sum()
    assert_close(hard, (x * ungroup(tokens, assignment)).sum())
    soft = (gather(x, weights) * tokens).sum()
    assert_close(soft, (x * scatter(tokens, weights)).sum())


def test_unassigned_patches_and_empty_batches() -> None:
    x, unassigned = randn(2, 5, 3), torch.full((2, 5), -1)
    assert not group_sum(x, unassigned, 4).any()
    assert not torch.cat([part.flatten() for part in group_mean(x, unassigned, 4)]).any()
    assert not ungroup(randn(2, 4, 3), unassigned).any()
    assert group_mean(x, unassigned, 0)[1].shape == (2, 0)
    assert ungroup(randn(2, 0, 3), unassigned).shape == (2, 5, 3)
    x, assignment = torch.zeros(0, 5, 3), torch.zeros(0, 5, dtype=torch.long)
    assert group_mean(x, assignment, 4)[0].shape == (0, 4, 3)
    assert ungroup(torch.zeros(0, 4, 3), assignment).shape == (0, 5, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_groups_in_low_precision(dtype: torch.dtype) -> None:
    """A running bfloat16 count would stop at 256, a float16 count at 2048."""
    n = 5000
    x, weights = rand(1, n, 3, seed=1, dtype=dtype), rand(1, n, seed=2, dtype=dtype)
    assignment = torch.zeros(1, n, dtype=torch.long)
    mean, total = group_mean(x, assignment, 1)
    assert_close(mean[0, 0], x[0].double().mean(0), dtype)
    assert_close(total / n, torch.ones(1, 1), dtype)
    mean, _ = group_mean(x, assignment, 1, weights=weights)
    w = weights[0].double().unsqueeze(1)
    assert_close(mean[0, 0], (w * x[0].double()).sum(0) / w.sum(), dtype)


def test_images_do_not_influence_each_other() -> None:
    x, assignment = randn(3, 12, 4, seed=4), random_assignment(3, 12, 5, 4)
    x[0] = torch.nan
    assert torch.isfinite(group_mean(x, assignment, 5)[0][1:]).all()


def test_no_one_hot_product_is_made() -> None:
    x, assignment = randn(1, 300, 4), random_assignment(1, 300, 100, 0)
    with LargestTensor() as largest:
        group_mean(x, assignment, 100)
    assert largest.numel == 300 * 4, largest.operation


def test_checks_find_an_index_of_another_image(checks_on: None) -> None:
    x = randn(2, 3, 4)
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=rf"take: index is {wrong} at \(1, 0\); expected 0 to 2"):
            take(x, torch.tensor([[0], [wrong]]))
    with pytest.raises(ValueError, match=r"group_sum: assignment is 2 at \(0, 1\); expected -1 to 1"):
        group_sum(x, torch.tensor([[0, 2, -1], [0, 0, 0]]), 2)


def softmax(values: list[float]) -> list[float]:
    e = [math.exp(v - max(values)) for v in values]
    return [v / math.fsum(e) for v in e]


@EXAMPLES
@given(
    b=st.integers(1, 2), n=st.integers(1, 8), k=st.integers(1, 6), seed=st.integers(0, 10_000), dtype=DTYPES
)
def test_assign_soft_equals_the_reference(b: int, n: int, k: int, seed: int, dtype: torch.dtype) -> None:
    logits = (3 * randn(b, n, k, seed=seed)).to(dtype)
    over_groups = [[softmax(patch) for patch in image] for image in logits.tolist()]
    over_patches = [[softmax(group) for group in image] for image in logits.mT.tolist()]
    assert_close(assign_soft(logits, over="groups"), over_groups)
    assert_close(assign_soft(logits, over="patches"), torch.tensor(over_patches, dtype=torch.float64).mT)


@EXAMPLES
@given(
    b=st.integers(1, 2), n=st.integers(1, 8), k=st.integers(1, 6), seed=st.integers(0, 10_000), dtype=DTYPES
)
def test_gather_and_scatter_equal_the_reference(
    b: int, n: int, k: int, seed: int, dtype: torch.dtype
) -> None:
    c = 3
    x, tokens = randn(b, n, c, seed=seed, dtype=dtype), randn(b, k, c, seed=seed + 1, dtype=dtype)
    weights = rand(b, n, k, seed=seed + 2, dtype=dtype) + 0.01
    gathered, scattered = torch.zeros(b, k, c).double(), torch.zeros(b, n, c).double()
    total = torch.zeros(b, k, 1).double()
    for image in range(b):
        for i in range(n):
            for j in range(k):
                w = float(weights[image, i, j])
                gathered[image, j] += w * x[image, i].double()
                scattered[image, i] += w * tokens[image, j].double()
                total[image, j] += w
    assert_close(gather(x, weights), gathered, dtype)
    assert_close(gather(x, weights, normalize=True), gathered / total, dtype)
    assert_close(scatter(tokens, weights), scattered, dtype)


@EXAMPLES
@given(**(SIZES | {"k": st.integers(1, 7)}))
def test_constant_maps_are_preserved(b: int, n: int, c: int, k: int, seed: int) -> None:
    x = randn(b, 1, c, seed=seed).expand(b, n, c)
    tokens, logits = x[:, :1].expand(b, k, c), 3 * randn(b, n, k, seed=seed + 1)
    for over in ("patches", "groups"):
        assert_close(gather(x, assign_soft(logits, over=over), normalize=True, eps=0), tokens)
    assert_close(gather(x, assign_soft(logits)), tokens)
    assert_close(scatter(tokens, assign_soft(logits, over="groups")), x)


def test_soft_groups_at_the_limits() -> None:
    weights = torch.zeros(1, 4, 2)
    weights[0, :, 0] = 1
    assert gather(torch.ones(1, 4, 3), weights, normalize=True).tolist() == [[[1, 1, 1], [0, 0, 0]]]
    assert torch.isfinite(assign_soft(torch.tensor([[[3e38], [-3e38]]]))).all()
    with pytest.raises(ValueError, match="over='pixels' is neither 'patches' nor 'groups'"):
        assign_soft(torch.zeros(1, 2, 3), over="pixels")  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.bfloat16, True), (torch.float16, False)])
def test_160_000_patches_in_low_precision(dtype: torch.dtype, autocast: bool) -> None:
    """Weights of 6e-6: a half-precision sum would stop growing long before it reaches one."""
    n, k, c = 160_000, 3, 4
    logits, x = randn(1, n, k, seed=1, dtype=dtype), (randn(1, n, c, seed=2) + 1).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        weights = assign_soft(logits)
        tokens, means = gather(x, weights), gather(x, weights, normalize=True)
    exact = torch.softmax(logits.double(), 1)
    assert weights.dtype == torch.float32
    assert (weights.double() / exact - 1).abs().max() < 1e-4
    expected = exact.mT @ x.double()
    assert tokens.dtype == dtype
    assert_close(tokens, expected)
    assert_close(means, expected)


def all_operations(x: Tensor, assignment: Tensor, weights: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    """Each operation once, for ``x (B, N, C)`` with N = K."""
    n = x.shape[1]
    soft = assign_soft(logits)  # (B, N, N)
    return (
        group_sum(x, assignment, n),
        *group_mean(x, assignment, n, weights=weights),
        ungroup(x, assignment),
        take(x, assignment.abs()),
        soft,
        gather(x, soft, normalize=True),
        scatter(x, soft),
    )


def test_memory_layout_autocast_and_compilation_change_nothing() -> None:
    x, assignment = randn(3, 9, 4, seed=8, dtype=torch.float32), random_assignment(3, 9, 9, 8)
    weights, logits = rand(3, 9, seed=9, dtype=torch.float32), randn(3, 9, 9, seed=10, dtype=torch.float32)
    before = x.clone()
    expected = all_operations(x, assignment, weights, logits)
    for other, other_logits in zip(layouts(x), layouts(logits), strict=True):
        assert_same_leaves(all_operations(other, assignment, weights, other_logits), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_leaves(all_operations(x, assignment, weights, logits), expected)
    assert_same_leaves(compiled(all_operations)(x, assignment, weights, logits), expected)
    assert torch.equal(x, before)


def test_gradients() -> None:
    x, tokens = randn(2, 6, 3, seed=5).requires_grad_(), randn(2, 4, 3, seed=7).requires_grad_()
    weights, logits = (rand(2, 6, seed=6) + 0.1).requires_grad_(), randn(2, 6, 4, seed=11).requires_grad_()
    soft = (rand(2, 6, 4, seed=12) + 0.1).requires_grad_()
    assignment = torch.tensor([[0, 1, -1, 1, 3, 3], [2, 2, 2, -1, 0, 1]])

    def check(function: object, *inputs: Tensor) -> bool:
        return torch.autograd.gradcheck(function, inputs, fast_mode=True)

    assert check(lambda x: group_sum(x, assignment, 4), x)
    assert check(lambda x, w: group_mean(x, assignment, 4, weights=w), x, weights)
    assert check(lambda t: ungroup(t, assignment), tokens)
    assert check(lambda x: take(x, torch.tensor([[5, 0, 5], [1, 2, 3]])), x)
    assert check(lambda logits: assign_soft(logits, over="patches"), logits)
    assert check(lambda logits: assign_soft(logits, over="groups"), logits)
    assert check(lambda x, w: gather(x, w, normalize=True), x, soft)
    assert check(scatter, tokens, soft)


def test_gradients_of_groups_without_weight_are_finite() -> None:
    x, weights = randn(1, 4, 2).requires_grad_(), torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    group_mean(x, torch.tensor([[0, 0, 2, 2]]), 3, weights=weights)[0].sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert weights.grad is not None
    assert torch.isfinite(weights.grad).all()
