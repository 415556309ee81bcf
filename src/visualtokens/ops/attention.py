"""Scaled dot-product attention, its heads, and how much attention a token receives."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from visualtokens.ops.numerics import accumulation_dtype


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, scale: float | None = None
) -> Tensor:
    """softmax(q kᵀ · scale + bias) v, ``(B, heads, N, E)``; the attention matrix is not stored.

    ``q (B, heads, N, D)``, ``k (B, heads, M, D)``, ``v (B, heads, M, E)``; ``bias`` broadcasts to
    ``(B, heads, N, M)``; ``scale`` defaults to D^-0.5.
    """
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``(B, N, C)`` to ``(B, heads, N, C / heads)``."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """``(B, heads, N, D)`` to ``(B, N, heads · D)``."""
    return x.transpose(1, 2).flatten(2)


def significance(attention: Tensor) -> Tensor:
    """Σ over heads and queries of ``attention (B, heads, queries, N)``: ``(B, N)``, at least float32."""
    return attention.sum(dim=(1, 2), dtype=accumulation_dtype(attention))
