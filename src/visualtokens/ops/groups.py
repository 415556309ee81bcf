"""Hard grouping: each of N patches belongs to one of K tokens, or to none (-1).

Indices must be in range: for speed the images of a batch lie in one table, and a wrong index would read
the next image. ``set_checks(True)`` finds it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from visualtokens.ops.checks import check_finite, check_range, own_precision


def group_sum(x: Tensor, assignment: Tensor, k: int) -> Tensor:
    """Sum the patches of each group: ``x (B, N, C)`` and ``assignment (B, N)`` give ``(B, K, C)``.

    O(N·C): one row addition per patch, no one-hot product.
    """
    check_range("group_sum", "assignment", assignment, -1, k - 1)
    return _add_up(x, _rows(assignment, k), k)


def group_mean(
    x: Tensor, assignment: Tensor, k: int, *, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Token Pooling Eq. 15: the weighted mean of each group ``(B, K, C)``, and its total weight ``(B, K)``.

    ``weights (B, N)`` are ones unless given. A group without weight has a mean of zero.
    """
    check_range("group_mean", "assignment", assignment, -1, k - 1)
    w = x.new_ones(x.shape[:2]) if weights is None else weights.to(x.dtype)  # (B, N)
    rows = _rows(assignment, k)
    total = w.new_zeros(x.shape[0], k + 1).scatter_add(1, rows, w)[:, :k]  # (B, K)
    weighted = x if weights is None else x * w.unsqueeze(2)
    return _add_up(weighted, rows, k) / torch.where(total > 0, total, 1).unsqueeze(2), total


def _rows(assignment: Tensor, k: int) -> Tensor:
    """``(B, N)``: as the assignment, but nobody is number K, so that a row more takes what is nobody's."""
    return assignment % (k + 1)


def _add_up(x: Tensor, rows: Tensor, k: int) -> Tensor:
    b, n, c = x.shape
    if b > 1:  # step over the other images
        rows = rows + torch.arange(0, b * (k + 1), k + 1, device=x.device).unsqueeze(1)
    out = x.new_zeros(b * (k + 1), c).index_add_(0, rows.flatten(), x.reshape(b * n, c))
    return out.view(b, k + 1, c)[:, :k]


def ungroup(tokens: Tensor, assignment: Tensor) -> Tensor:
    """The way back: every patch gets a copy of its token, ``(B, N, C)``; a patch of nobody gets zeros."""
    if tokens.shape[1] == 0:
        return tokens.new_zeros(*assignment.shape, tokens.shape[2])
    return torch.where((assignment >= 0).unsqueeze(2), take(tokens, assignment.clamp_min(0)), 0)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of ``x (B, N, C)`` by ``index (B, K)``: ``(B, K, C)``. Several times as fast as ``x.gather``."""
    check_range("take", "index", index, 0, x.shape[1] - 1)
    b, n, c = x.shape
    if b == 1:  # no other image to step over
        return x.index_select(1, index.flatten())
    rows = index + torch.arange(0, b * n, n, device=x.device).unsqueeze(1)
    return x.reshape(b * n, c).index_select(0, rows.flatten()).unflatten(0, index.shape)


# Soft grouping: assign, gather, scatter. Sums over patches run in float32, autocast or not.
#
# At 800×1216 pixels and stride 4 there are 60,800 patches: a uniform softmax weight is 1.6e-5, and a
# bfloat16 sum of them would stop growing at 1/256 of its value.


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
