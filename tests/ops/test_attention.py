"""Attention and significance against loops over images, heads and queries."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from visualtokens.ops import attend, join_heads, significance, split_heads

from .helpers import LargestTensor, assert_close, assert_same_leaves, compiled, rand, randn


def reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """One query at a time, in float64."""
    b, heads, n, _ = q.shape
    m = k.shape[2]
    added = torch.zeros(b, heads, n, m) if bias is None else bias.expand(b, heads, n, m)
    out = torch.zeros(b, heads, n, v.shape[3], dtype=torch.float64)
    for image in range(b):
        for head in range(heads):
            for i in range(n):
                logits = [
                    float(q[image, head, i].double() @ k[image, head, j].double()) * scale
                    + float(added[image, head, i, j])
                    for j in range(m)
                ]
                weights = [math.exp(value - max(logits)) for value in logits]
                for j in range(m):
                    out[image, head, i] += weights[j] / sum(weights) * v[image, head, j].double()
    return out


def inputs(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Two images, three heads, four queries, five keys; odd seeds have wider values than keys."""
    q, k = randn(2, 3, 4, 6, seed=seed, dtype=dtype), randn(2, 3, 5, 6, seed=seed + 1, dtype=dtype)
    return q, k, randn(2, 3, 5, 6 + seed % 2, seed=seed + 2, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("bias_shape", "scale"), [(None, None), ((2, 3, 4, 5), None), ((2, 1, 1, 5), 0.1), ((4, 5), 1.0)]
)
def test_attend_equals_the_reference(
    dtype: torch.dtype, bias_shape: tuple[int, ...] | None, scale: float | None
) -> None:
    for seed in (0, 1):
        q, k, v = inputs(seed, dtype)
        bias = None if bias_shape is None else randn(*bias_shape, seed=seed + 3, dtype=dtype)
        result = attend(q, k, v, bias, scale=scale)
        assert result.dtype == dtype
        assert_close(result, reference(q, k, v, bias, 6**-0.5 if scale is None else scale))


def test_a_bias_of_log_size_counts_a_token_size_times() -> None:
    """Token Pooling, Appendix E: one key with a bias of log 3 acts as three equal keys."""
    q, k, v = inputs(0)
    size = torch.tensor([1, 3, 1, 2, 1])
    carried = attend(q, k, v, size.double().log().view(1, 1, 1, 5))
    assert_close(carried, attend(q, k.repeat_interleave(size, 2), v.repeat_interleave(size, 2)))


def test_a_bias_of_minus_infinity_masks_a_key() -> None:
    q, k, v = inputs(0)
    bias = torch.zeros(1, 1, 1, 5, dtype=torch.float64)
    bias[..., 2:] = -torch.inf
    assert_close(attend(q, k, v, bias), attend(q, k[:, :, :2], v[:, :, :2]))


def test_heads_split_and_join() -> None:
    x = randn(2, 7, 12)
    split = split_heads(x, 3)
    assert split.shape == (2, 3, 7, 4)
    for head in range(3):
        assert torch.equal(split[:, head], x[:, :, head * 4 : (head + 1) * 4])
    assert torch.equal(join_heads(split), x)


def test_autocast_runs_in_bfloat16() -> None:
    q, k, v = inputs(3, torch.float32)
    bias = randn(1, 3, 4, 5, seed=9, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        result = attend(q, k, v, bias)
    assert_close(result, reference(q, k, v, bias, 6**-0.5), torch.bfloat16)


def test_no_attention_matrix_is_made() -> None:
    n = 300
    x = randn(1, 2, n, 8, dtype=torch.float32).requires_grad_()
    for bias in (None, torch.zeros(1, 1, 1, n)):
        with LargestTensor() as largest:
            attend(x, x, x, bias).sum().backward()
        assert largest.numel < n * n, largest.operation


def test_memory_layout_does_not_matter() -> None:
    q = split_heads(randn(2, 7, 12, seed=4), 3)  # a view that is not contiguous
    assert_close(attend(q, q, q), attend(q.contiguous(), q.contiguous(), q.contiguous()))
    shared = q[:1].expand(2, 3, 7, 4)
    assert_close(attend(q, shared, shared), attend(q, shared.clone(), shared.clone()))


def test_significance_is_the_sum_over_heads_and_queries() -> None:
    attention = rand(2, 3, 4, 5, seed=3)
    expected = torch.zeros(2, 5, dtype=torch.float64)
    for image in range(2):
        for head in range(3):
            for query in range(4):
                for token in range(5):
                    expected[image, token] += float(attention[image, head, query, token])
    assert_close(significance(attention), expected)
    strided = attention.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    assert_close(significance(strided), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_significance_is_summed_in_float32(dtype: torch.dtype) -> None:
    attention = randn(1, 12, 1000, 8, seed=2).softmax(-1).to(dtype)
    result = significance(attention)
    assert result.dtype == torch.float32
    assert_close(result, attention.double().sum((1, 2)))


def test_gradients() -> None:
    q, k, v = (t.requires_grad_() for t in inputs(5))
    bias = randn(1, 3, 4, 5, seed=9).requires_grad_()
    assert torch.autograd.gradcheck(attend, (q, k, v), fast_mode=True)
    assert torch.autograd.gradcheck(attend, (q, k, v, bias), fast_mode=True)
    assert torch.autograd.gradcheck(significance, rand(1, 2, 3, 3).requires_grad_(), fast_mode=True)


def test_compiles_to_one_graph() -> None:
    def function(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        q = split_heads(x, 3)
        return join_heads(attend(q, q, q, bias)), significance(q @ q.mT)

    x, bias = randn(2, 7, 12), randn(1, 3, 7, 7, seed=9)
    assert_same_leaves(compiled(function)(x, bias), function(x, bias))
