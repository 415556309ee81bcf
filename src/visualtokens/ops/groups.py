"""Patches to tokens and back, by hard groups or by soft weights.

Hard: ``assignment (B, N)`` gives each patch the index of its token, or -1 for none. Indices must be in range:
all images of a batch share one table, so a wrong index would read the next image. ``set_checks(True)`` finds
wrong indices.

Soft: ``weights (B, N, K)``. Sums over patches run in float32, also under autocast: an image of 800×1216
pixels has 60,800 patches at stride 4, a uniform softmax weight is 1.6e-5, and a bfloat16 sum of such weights
stops growing at 1/256 of the total.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from visualtokens.ops.numerics import accumulation_dtype, check_finite, check_range, no_autocast


def group_sum(x: Tensor, assignment: Tensor, k: int) -> Tensor:
    """Sum of the patches of each group: ``x (B, N, C)`` and ``assignment (B, N)`` give ``(B, K, C)``.

    O(N·C): one row addition per patch instead of a one-hot product.
    """
    check_range("group_sum", "assignment", assignment, -1, k - 1)
    return _sum_rows(x, _rows(assignment, k), k)


def group_mean(
    x: Tensor, assignment: Tensor, k: int, *, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Token Pooling Eq. 15: the weighted mean of each group ``(B, K, C)``, and its total weight ``(B, K)``.

    ``x (B, N, C)``, ``assignment (B, N)``; ``weights (B, N)`` default to ones. A group of zero weight has
    mean zero.
    """
    check_range("group_mean", "assignment", assignment, -1, k - 1)
    w = x.new_ones(x.shape[:2]) if weights is None else weights.to(x.dtype)  # (B, N)
    rows = _rows(assignment, k)
    total = w.new_zeros(x.shape[0], k + 1).scatter_add(1, rows, w)[:, :k]  # (B, K)
    weighted = x if weights is None else x * w.unsqueeze(2)
    return _sum_rows(weighted, rows, k) / torch.where(total > 0, total, 1).unsqueeze(2), total


def _rows(assignment: Tensor, k: int) -> Tensor:
    """``(B, N)``: the assignment with -1 replaced by K, an extra row that collects unassigned patches."""
    return assignment % (k + 1)


def _sum_rows(x: Tensor, rows: Tensor, k: int) -> Tensor:
    """Sum of ``x (B, N, C)`` by ``rows (B, N)``, without the extra row: ``(B, K, C)``."""
    b, n, c = x.shape
    if b > 1:  # offset into the table shared by all images
        rows = rows + torch.arange(0, b * (k + 1), k + 1, device=x.device).unsqueeze(1)
    out = x.new_zeros(b * (k + 1), c).index_add_(0, rows.flatten(), x.reshape(b * n, c))
    return out.view(b, k + 1, c)[:, :k]


def ungroup(tokens: Tensor, assignment: Tensor) -> Tensor:
    """Copy of each patch's token, ``(B, N, C)``, zeros for unassigned patches: the inverse of grouping.

    ``tokens (B, K, C)``, ``assignment (B, N)``.
    """
    if tokens.shape[1] == 0:
        return tokens.new_zeros(*assignment.shape, tokens.shape[2])
    return torch.where((assignment >= 0).unsqueeze(2), take(tokens, assignment.clamp_min(0)), 0)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of ``x (B, N, C)`` by ``index (B, K)``: ``(B, K, C)``. Several times as fast as ``x.gather``."""
    check_range("take", "index", index, 0, x.shape[1] - 1)
    b, n, c = x.shape
    if b == 1:
        return x.index_select(1, index.flatten())
    rows = index + torch.arange(0, b * n, n, device=x.device).unsqueeze(1)
    return x.reshape(b * n, c).index_select(0, rows.flatten()).unflatten(0, index.shape)


def assign_soft(logits: Tensor, *, over: Literal["patches", "groups"] = "patches") -> Tensor:
    """A = softmax(logits), ``(B, N, K)``, in float32 (float64 for float64 logits).

    ``over="patches"``: the weights of each group sum to one over the N patches (VT Eq. 1, PaCa Eq. 7).
    ``over="groups"``: the weights of each patch sum to one over the K groups (VT Eq. 5, STViT Eq. 1).
    """
    check_finite("assign_soft", logits=logits)
    if over not in ("patches", "groups"):
        raise ValueError(f"over={over!r} is neither 'patches' nor 'groups'")
    return torch.softmax(logits, 1 if over == "patches" else 2, dtype=accumulation_dtype(logits))


def gather(x: Tensor, weights: Tensor, *, normalize: bool = False, eps: float = 1e-12) -> Tensor:
    """T = Aᵀ X: ``x (B, N, C)`` and ``weights (B, N, K)`` give one token per group, ``(B, K, C)``.

    ``normalize=True`` divides each token by the total weight of its group (STViT Eq. 2), which turns
    weights that sum to one over the groups into weighted means. The result has the dtype of ``x``.
    """
    check_finite("gather", x=x, weights=weights)
    dtype = accumulation_dtype(x)
    with no_autocast(x):
        weights = weights.to(dtype)
        tokens = weights.mT @ x.to(dtype)  # (B, K, C)
        if normalize:
            tokens = tokens / (weights.sum(1).unsqueeze(2) + eps)
    return tokens.to(x.dtype)


def scatter(tokens: Tensor, weights: Tensor) -> Tensor:
    """X = A T: ``tokens (B, K, C)`` and ``weights (B, N, K)`` give each patch its mixture, ``(B, N, C)``."""
    check_finite("scatter", tokens=tokens, weights=weights)
    dtype = accumulation_dtype(tokens)
    with no_autocast(tokens):
        x = weights.to(dtype) @ tokens.to(dtype)  # (B, N, C)
    return x.to(tokens.dtype)
