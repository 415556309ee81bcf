from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visualtokens.ops import significance

from .helpers import EXAMPLES, assert_close, assert_same_leaves, compiled, rand, randn


def reference(attention: Tensor) -> Tensor:
    """Token j receives what every query of every head gives it."""
    b, heads, queries, n = attention.shape
    out = torch.zeros(b, n, dtype=torch.float64)
    for image in range(b):
        for head in range(heads):
            for query in range(queries):
                for token in range(n):
                    out[image, token] += float(attention[image, head, query, token])
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@EXAMPLES
@given(
    b=st.integers(1, 2),
    heads=st.integers(1, 3),
    queries=st.integers(1, 5),
    n=st.integers(1, 6),
    seed=st.integers(0, 10_000),
)
def test_equals_the_reference(
    dtype: torch.dtype, b: int, heads: int, queries: int, n: int, seed: int
) -> None:
    attention = rand(b, heads, queries, n, seed=seed, dtype=dtype)
    result = significance(attention)
    assert result.dtype == dtype
    assert_close(result, reference(attention))


def test_all_the_attention_there_is() -> None:
    """Each query of each head hands out exactly one."""
    attention = randn(2, 6, 197, 197, seed=1).softmax(-1)
    assert_close(significance(attention).sum(1), torch.full((2,), 6 * 197))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_attention_is_summed_in_float32(dtype: torch.dtype) -> None:
    attention = randn(1, 12, 1000, 8, seed=2).softmax(-1).to(dtype)
    result = significance(attention)
    assert result.dtype == torch.float32
    assert_close(result, attention.double().sum((1, 2)))


def test_layout_gradient_autocast_and_graph() -> None:
    attention = rand(2, 3, 4, 5, seed=3)
    strided = attention.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    assert_close(significance(strided), significance(attention))
    shared = attention[:, :1].expand(2, 6, 4, 5)
    assert_close(significance(shared), 6 * significance(attention[:, :1]))
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_leaves(significance(attention.float()), significance(attention).float())
    assert_same_leaves(compiled(significance)(attention), significance(attention))
    assert torch.autograd.gradcheck(significance, attention.requires_grad_())
