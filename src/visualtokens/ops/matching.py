"""Token merging by bipartite soft matching."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visualtokens.ops.groups import group_mean
from visualtokens.ops.numerics import check_finite, no_autocast, upcast


class Merged(NamedTuple):
    tokens: Tensor  # (B, K, C): K = N − r
    size: Tensor  # (B, K): patches per token
    assignment: Tensor  # (B, N): the new token of each old one, for `ungroup(tokens, assignment)`


def bipartite_merge(
    x: Tensor,
    r: int,
    *,
    metric: Tensor | None = None,
    size: Tensor | None = None,
    protect: int = 0,
) -> Merged:
    """Merge r of the N tokens of ``x (B, N, C)`` into their most similar neighbours.

    The tokens after the first ``protect`` (such as a class token) are split alternately into two sets.
    Each token of the first set is paired with the token of the second whose ``metric (B, N, D)`` has the
    highest cosine similarity; ``metric`` defaults to x. The r best pairs are replaced by their means,
    weighted by ``size (B, N)``, which defaults to ones. At most the whole first set can merge, see
    :func:`merge_count`. Kept tokens stay in order. Gradients reach x through the means, not through the
    matching.
    """
    check_finite("bipartite_merge", x=x, metric=metric, size=size)
    b, n, _ = x.shape
    if r < 0:
        raise ValueError(f"r={r} is negative; give the number of tokens to merge away")
    if protect < 0:
        raise ValueError(f"protect={protect} is negative; give the number of tokens at the front to keep")
    if size is not None and size.shape != (b, n):
        raise ValueError(f"size has shape {tuple(size.shape)}; expected (B, N) = {(b, n)}")
    assignment = _match(x if metric is None else metric, r, protect)  # (B, N)
    values = upcast(x)
    size = values.new_ones(b, n) if size is None else size
    tokens, total = group_mean(values, assignment, n - merge_count(n, r, protect), weights=size)
    return Merged(tokens.to(x.dtype), total, assignment)


def merge_count(n: int, r: int, protect: int = 0) -> int:
    """Number of tokens that one :func:`bipartite_merge` removes: r, but at most the first set.

    Nothing merges if fewer than two tokens are unprotected.
    """
    free = max(n - protect, 0)
    return min(r, (free + 1) // 2) if free > 1 else 0


@torch.no_grad()
def _match(metric: Tensor, r: int, protect: int) -> Tensor:
    """Index of each token among those that remain after merging, ``(B, N)``."""
    b, n, _ = metric.shape
    r = merge_count(n, r, protect)
    itself = torch.arange(n, device=metric.device).expand(b, n)
    if r == 0:
        return itself
    unit = F.normalize(upcast(metric), dim=2)
    with no_autocast(unit):
        similarity = unit[:, protect::2] @ unit[:, protect + 1 :: 2].mT  # (B, first set, second set)
    best, partner = similarity.max(2)  # (B, first set)
    merging = best.sort(dim=1, descending=True, stable=True).indices[:, :r]  # (B, r), within the first set
    source = protect + 2 * merging  # (B, r), among all tokens
    target = itself.scatter(1, source, protect + 1 + 2 * partner.gather(1, merging))  # (B, N)
    kept = torch.ones_like(itself).scatter(1, source, 0)
    new_index = kept.cumsum(1) - 1  # (B, N), of kept tokens
    return new_index.gather(1, target)
