from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visualtokens.ops import assign_soft, gather, scatter

from .helpers import EXAMPLES, assert_close, assert_same_leaves, compiled, layouts, rand, randn

Over = Literal["patches", "groups"]


def softmax(values: list[float]) -> list[float]:
    e = [math.exp(v - max(values)) for v in values]
    return [v / math.fsum(e) for v in e]


def reference_assign(logits: Tensor, over: Over) -> Tensor:
    b, n, k = logits.shape
    out = torch.zeros(b, n, k, dtype=torch.float64)
    for image in range(b):
        if over == "patches":
            for j in range(k):
                out[image, :, j] = torch.tensor(softmax(logits[image, :, j].tolist()), dtype=torch.float64)
        else:
            for i in range(n):
                out[image, i] = torch.tensor(softmax(logits[image, i].tolist()), dtype=torch.float64)
    return out


def reference_gather(x: Tensor, weights: Tensor, normalize: bool) -> Tensor:
    b, n, c = x.shape
    k = weights.shape[2]
    out = torch.zeros(b, k, c, dtype=torch.float64)
    for image in range(b):
        for j in range(k):
            column = [float(w) for w in weights[image, :, j]]
            for channel in range(c):
                value = math.fsum(column[i] * float(x[image, i, channel]) for i in range(n))
                out[image, j, channel] = value / math.fsum(column) if normalize else value
    return out


def reference_scatter(tokens: Tensor, weights: Tensor) -> Tensor:
    b, k, c = tokens.shape
    n = weights.shape[1]
    out = torch.zeros(b, n, c, dtype=torch.float64)
    for image in range(b):
        for i in range(n):
            for j in range(k):
                out[image, i] += float(weights[image, i, j]) * tokens[image, j].double()
    return out


SIZES = {
    "b": st.integers(1, 2),
    "n": st.integers(1, 12),
    "c": st.integers(1, 5),
    "k": st.integers(1, 6),
    "seed": st.integers(0, 10_000),
}


@pytest.mark.parametrize("over", ["patches", "groups"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@EXAMPLES
@given(**SIZES)
def test_assign_equals_the_reference(
    over: Over, dtype: torch.dtype, b: int, n: int, c: int, k: int, seed: int
) -> None:
    logits = (c * randn(b, n, k, seed=seed)).to(dtype)
    result = assign_soft(logits, over=over)
    assert result.dtype == dtype
    assert_close(result, reference_assign(logits, over))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@EXAMPLES
@given(**SIZES)
def test_gather_equals_the_reference(
    normalize: bool, dtype: torch.dtype, b: int, n: int, c: int, k: int, seed: int
) -> None:
    x = randn(b, n, c, seed=seed, dtype=dtype)
    weights = rand(b, n, k, seed=seed + 1, dtype=dtype) + 0.01
    result = gather(x, weights, normalize=normalize)
    assert result.dtype == dtype
    assert_close(result, reference_gather(x, weights, normalize))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@EXAMPLES
@given(**SIZES)
def test_scatter_equals_the_reference(dtype: torch.dtype, b: int, n: int, c: int, k: int, seed: int) -> None:
    tokens = randn(b, k, c, seed=seed, dtype=dtype)
    weights = rand(b, n, k, seed=seed + 1, dtype=dtype)
    result = scatter(tokens, weights)
    assert result.dtype == dtype
    assert_close(result, reference_scatter(tokens, weights))


@EXAMPLES
@given(**SIZES)
def test_scatter_is_the_transpose_of_gather(b: int, n: int, c: int, k: int, seed: int) -> None:
    """⟨gather(x), t⟩ = ⟨x, scatter(t)⟩ for the same weights."""
    x, tokens = randn(b, n, c, seed=seed), randn(b, k, c, seed=seed + 1)
    weights = rand(b, n, k, seed=seed + 2)
    assert_close((gather(x, weights) * tokens).sum(), (x * scatter(tokens, weights)).sum())


@EXAMPLES
@given(**SIZES)
def test_constant_maps_come_back(b: int, n: int, c: int, k: int, seed: int) -> None:
    """Weighted means of a constant are the constant, for either softmax."""
    x = randn(b, 1, c, seed=seed).expand(b, n, c)
    logits = 3 * randn(b, n, k, seed=seed + 1)
    for over in ("patches", "groups"):
        weights = assign_soft(logits, over=over)
        assert_close(gather(x, weights, normalize=True, eps=0), x[:, :1].expand(b, k, c))
    assert_close(gather(x, assign_soft(logits)), x[:, :1].expand(b, k, c))
    tokens = x[:, :1].expand(b, k, c)
    assert_close(scatter(tokens, assign_soft(logits, over="groups")), x)


def test_weightless_groups_gather_zero() -> None:
    weights = torch.zeros(1, 4, 2)
    weights[0, :, 0] = 1
    result = gather(torch.ones(1, 4, 3), weights, normalize=True)
    assert result.tolist() == [[[1, 1, 1], [0, 0, 0]]]


def test_no_patch_matters_more_than_another_at_the_start() -> None:
    assert_close(assign_soft(torch.zeros(1, 50, 3)), torch.full((1, 50, 3), 1 / 50))
    assert_close(assign_soft(torch.zeros(1, 50, 3), over="groups"), torch.full((1, 50, 3), 1 / 3))
    assert torch.isfinite(assign_soft(torch.tensor([[[3e38], [-3e38]]]))).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_160_000_patches_in_low_precision(dtype: torch.dtype, autocast: bool) -> None:
    """Weights of 6e-6: summed in half precision they would stop adding up long before one."""
    n, k, c = 160_000, 3, 4
    logits, x = randn(1, n, k, seed=1, dtype=dtype), (randn(1, n, c, seed=2) + 1).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        weights = assign_soft(logits)
        tokens, means = gather(x, weights), gather(x, weights, normalize=True)
    exact = torch.softmax(logits.double(), 1)
    assert weights.dtype == torch.float32
    assert_close(weights.double().sum(1), torch.ones(1, k), torch.float32)
    assert (weights.double() / exact - 1).abs().max() < 1e-4
    expected = exact.mT @ x.double()
    assert tokens.dtype == dtype
    assert_close(tokens, expected)
    assert_close(means, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scatter_in_low_precision(dtype: torch.dtype) -> None:
    tokens, weights = (
        randn(1, 64, 4, seed=3, dtype=dtype),
        assign_soft(randn(1, 20, 64, seed=4), over="groups"),
    )
    assert_close(scatter(tokens, weights), weights @ tokens.double(), dtype)
    assert scatter(tokens, weights).dtype == dtype


def test_autocast_changes_nothing() -> None:
    logits, x = randn(2, 40, 5, seed=5, dtype=torch.float32), randn(2, 40, 6, seed=6, dtype=torch.float32)
    weights = assign_soft(logits)
    expected = weights, gather(x, weights, normalize=True), scatter(x[:, :5], weights)
    with torch.autocast("cpu", torch.bfloat16):
        weights = assign_soft(logits)
        assert_same_leaves(
            (weights, gather(x, weights, normalize=True), scatter(x[:, :5], weights)), expected
        )


def test_memory_layout_does_not_matter_and_inputs_stay() -> None:
    x, logits = randn(3, 12, 4, seed=7), randn(3, 12, 4, seed=8)
    before, weights = x.clone(), assign_soft(logits)
    for (_, other_x), (_, other_logits) in zip(layouts(x), layouts(logits), strict=True):
        assert_close(assign_soft(other_logits), weights)
        assert_close(gather(other_x, assign_soft(other_logits)), gather(x, weights))
        assert_close(scatter(other_x[:, :4], assign_soft(other_logits)), scatter(x[:, :4], weights))
    assert torch.equal(x, before)


def test_gradients() -> None:
    x, tokens = randn(2, 6, 3, seed=9).requires_grad_(), randn(2, 4, 3, seed=10).requires_grad_()
    logits = randn(2, 6, 4, seed=11).requires_grad_()
    weights = (rand(2, 6, 4, seed=12) + 0.1).requires_grad_()
    check = torch.autograd.gradcheck
    assert check(lambda logits: assign_soft(logits, over="patches"), logits)
    assert check(lambda logits: assign_soft(logits, over="groups"), logits)
    assert check(gather, (x, weights))
    assert check(lambda x, w: gather(x, w, normalize=True), (x, weights))
    assert check(scatter, (tokens, weights))


def test_compile_to_one_graph_each() -> None:
    x, logits = randn(2, 9, 4, seed=13), randn(2, 9, 5, seed=14)
    weights = assign_soft(logits)
    assert_same_leaves(compiled(assign_soft)(logits), weights)
    result = compiled(gather)(x, weights, normalize=True)
    assert_same_leaves(result, gather(x, weights, normalize=True))
    assert_same_leaves(compiled(scatter)(x[:, :5], weights), scatter(x[:, :5], weights))


def test_unknown_softmax_axis_is_named() -> None:
    with pytest.raises(ValueError, match="over='pixels' is neither 'patches' nor 'groups'"):
        assign_soft(torch.zeros(1, 2, 3), over="pixels")  # type: ignore[arg-type]
