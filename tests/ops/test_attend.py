from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visualtokens.ops import attend, join_heads, split_heads

from .helpers import EXAMPLES, LargestTensor, assert_close, assert_same_leaves, compiled, randn


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
    """Two images, three heads, four queries, five keys; values are as wide as the keys, or wider."""
    wide = 6 + seed % 2
    q, k = randn(2, 3, 4, 6, seed=seed, dtype=dtype), randn(2, 3, 5, 6, seed=seed + 1, dtype=dtype)
    return q, k, randn(2, 3, 5, wide, seed=seed + 2, dtype=dtype)


BIASES = [None, (2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 1, 5), (3, 4, 5), (4, 5)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias_shape", BIASES)
@pytest.mark.parametrize("scale", [None, 1.0, 0.1])
def test_equals_the_reference(
    dtype: torch.dtype, bias_shape: tuple[int, ...] | None, scale: float | None
) -> None:
    for seed in (0, 1):
        q, k, v = inputs(seed, dtype)
        bias = None if bias_shape is None else randn(*bias_shape, seed=seed + 3, dtype=dtype)
        result = attend(q, k, v, bias, scale=scale)
        assert result.dtype == dtype
        assert_close(result, reference(q, k, v, bias, 6**-0.5 if scale is None else scale))


def test_a_bias_of_log_size_counts_a_token_that_often() -> None:
    """The carry of Token Pooling's Appendix E: one key with log 3 is three equal keys."""
    q, k, v = inputs(0)
    size = torch.tensor([1, 3, 1, 2, 1])
    carried = attend(q, k, v, size.double().log().view(1, 1, 1, 5))
    assert_close(carried, attend(q, k.repeat_interleave(size, 2), v.repeat_interleave(size, 2)))


def test_minus_infinity_masks_a_key() -> None:
    q, k, v = inputs(0)
    bias = torch.zeros(1, 1, 1, 5, dtype=torch.float64)
    bias[..., 2:] = -torch.inf
    assert_close(attend(q, k, v, bias), attend(q, k[:, :, :2], v[:, :, :2]))


@EXAMPLES
@given(
    b=st.integers(1, 3),
    n=st.integers(1, 7),
    heads=st.integers(1, 4),
    d=st.integers(1, 5),
    seed=st.integers(0, 10_000),
)
def test_heads_split_and_join(b: int, n: int, heads: int, d: int, seed: int) -> None:
    x = randn(b, n, heads * d, seed=seed)
    split = split_heads(x, heads)
    assert split.shape == (b, heads, n, d)
    for head in range(heads):
        assert torch.equal(split[:, head], x[:, :, head * d : (head + 1) * d])
    assert torch.equal(join_heads(split), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_low_precision(dtype: torch.dtype, biased: bool) -> None:
    q, k, v = inputs(2, dtype)
    bias = randn(1, 3, 4, 5, seed=9, dtype=dtype) if biased else None
    result = attend(q, k, v, bias)
    assert result.dtype == dtype
    assert_close(result, reference(q, k, v, bias, 6**-0.5))


@pytest.mark.parametrize("biased", [False, True])
def test_autocast_runs_in_bfloat16(biased: bool) -> None:
    q, k, v = inputs(3, torch.float32)
    bias = randn(1, 3, 4, 5, seed=9, dtype=torch.float32) if biased else None
    with torch.autocast("cpu", torch.bfloat16):
        result = attend(q, k, v, bias)
    assert_close(result, reference(q, k, v, bias, 6**-0.5), torch.bfloat16)


def test_no_attention_matrix_is_made() -> None:
    n = 300
    x = randn(1, 2, n, 8, dtype=torch.float32).requires_grad_()
    bias = torch.zeros(1, 1, 1, n)
    for extra in (None, bias):
        with LargestTensor() as largest:
            attend(x, x, x, extra).sum().backward()
        assert largest.numel < n * n, largest.operation


def test_layout_does_not_matter_and_inputs_stay() -> None:
    x = randn(2, 7, 12, seed=4)
    before = x.clone()
    q = split_heads(x, 3)  # a view that is not contiguous
    assert_close(attend(q, q, q), attend(q.contiguous(), q.contiguous(), q.contiguous()))
    shared = q[:1].expand(2, 3, 7, 4)
    assert_close(attend(q, shared, shared), attend(q, shared.clone(), shared.clone()))
    assert torch.equal(x, before)


def test_gradients() -> None:
    q, k, v = (t.requires_grad_() for t in inputs(5))
    bias = randn(1, 3, 4, 5, seed=9).requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v), (q, k, v))
    assert torch.autograd.gradcheck(attend, (q, k, v, bias))


def test_compile_to_one_graph_each() -> None:
    q, k, v = inputs(6)
    bias = randn(1, 3, 4, 5, seed=9)
    assert_same_leaves(compiled(attend)(q, k, v, bias), attend(q, k, v, bias))
    x = randn(2, 7, 12)
    assert_same_leaves(compiled(split_heads)(x, 3), split_heads(x, 3))
    assert_same_leaves(compiled(join_heads)(q), join_heads(q))
