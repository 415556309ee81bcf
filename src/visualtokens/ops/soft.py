"""Soft grouping: assign, gather, scatter. Sums over patches run in float32, autocast or not.

At 800×1216 pixels and stride 4 there are 60,800 patches: a uniform softmax weight is 1.6e-5, and a
bfloat16 sum of them would stop growing at 1/256 of its value.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from visualtokens.ops.checks import check_finite
from visualtokens.ops.precision import own_precision


def assign_soft(logits: Tensor, *, over: Literal["patches", "groups"] = "patches") -> Tensor:
    """A = softmax(logits), ``(B, N, K)`` in float32 (float64 stays).

    ``over="patches"``: each group spreads a weight of one over the N patches (VT Eq. 1, PaCa Eq. 7).
    ``over="groups"``: each patch spreads a weight of one over the K groups (VT Eq. 5, STViT Eq. 1).
    """
    check_finite("assign_soft", logits=logits)
    if over not in ("patches", "groups"):
        raise ValueError(f"over={over!r} is neither 'patches' nor 'groups'")
    return torch.softmax(logits, 1 if over == "patches" else 2, dtype=_accumulate(logits))


def gather(x: Tensor, weights: Tensor, *, normalize: bool = False, eps: float = 1e-12) -> Tensor:
    """T = Aᵀ X: ``x (B, N, C)`` and ``weights (B, N, K)`` give one token per group, ``(B, K, C)``.

    ``normalize=True`` divides each token by its group's total weight (STViT Eq. 2), so that weights
    which sum to one over the groups give weighted means. The result has the dtype of ``x``.
    """
    check_finite("gather", x=x, weights=weights)
    dtype = _accumulate(x)
    with own_precision(x):
        weights = weights.to(dtype)
        tokens = weights.mT @ x.to(dtype)  # (B, K, C)
        if normalize:
            tokens = tokens / (weights.sum(1).unsqueeze(2) + eps)
    return tokens.to(x.dtype)


def scatter(tokens: Tensor, weights: Tensor) -> Tensor:
    """X = A T: ``tokens (B, K, C)`` and ``weights (B, N, K)`` give every patch its answer, ``(B, N, C)``."""
    check_finite("scatter", tokens=tokens, weights=weights)
    dtype = _accumulate(tokens)
    with own_precision(tokens):
        x = weights.to(dtype) @ tokens.to(dtype)  # (B, N, C)
    return x.to(tokens.dtype)


def _accumulate(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
