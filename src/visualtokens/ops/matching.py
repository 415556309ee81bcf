"""Token merging by bipartite soft matching."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visualtokens.ops.checks import check_finite, own_precision
from visualtokens.ops.groups import group_mean


class Merged(NamedTuple):
    tokens: Tensor  # (B, K, C): K = N − r
    size: Tensor  # (B, K): how many patches each token stands for
    assignment: Tensor  # (B, N): where each old token went; `ungroup(tokens, assignment)` goes back


def bipartite_merge(
    x: Tensor,
    r: int,
    *,
    metric: Tensor | None = None,
    size: Tensor | None = None,
    protect: int = 0,
) -> Merged:
    """Merge r of the N tokens of ``x (B, N, C)`` into their most similar neighbours.

    The tokens after the first ``protect`` (class token and the like) are dealt out alternately to two
    sides. Each token of the first side names the token of the other side whose ``metric (B, N, D)``
    (x itself unless given) has the highest cosine with its own; the r best pairs merge into their mean,
    weighted by ``size (B, N)`` (ones unless given). At most the whole first side can merge: a larger r
    is cut. Kept tokens stay in order. Gradients reach x through the means, not through the matching.
    """
    check_finite("bipartite_merge", x=x, metric=metric, size=size)
    if r < 0:
        raise ValueError(f"r={r} is negative; give the number of tokens to merge away")
    b, n, _ = x.shape
    if protect < 0:
        raise ValueError(f"protect={protect} is negative; give the number of tokens at the front to keep")
    if size is not None and size.shape != (b, n):
        raise ValueError(f"size has shape {tuple(size.shape)}; expected (B, N) = {(b, n)}")
    with torch.no_grad():
        assignment = match(x if metric is None else metric, r, protect=protect)  # (B, N)
    k = n - merge_count(n, r, protect)
    values = x if x.dtype == torch.float64 else x.float()
    size = values.new_ones(b, n) if size is None else size
    tokens, total = group_mean(values, assignment, k, weights=size)
    return Merged(tokens.to(x.dtype), total, assignment)


def merge_count(n: int, r: int, protect: int = 0) -> int:
    """How many of n tokens really merge when r are asked for: none without a partner, else up to one side."""
    free = max(n - protect, 0)
    return min(r, (free + 1) // 2) if free > 1 else 0


def match(metric: Tensor, r: int, *, protect: int = 0) -> Tensor:
    """The assignment ``(B, N)`` of each token to its place among the N − r that remain."""
    b, n, _ = metric.shape
    r = merge_count(n, r, protect)
    itself = torch.arange(n, device=metric.device).expand(b, n)
    if r == 0:
        return itself
    unit = F.normalize(metric if metric.dtype == torch.float64 else metric.float(), dim=2)
    with own_precision(metric):
        similarity = unit[:, protect::2] @ unit[:, protect + 1 :: 2].mT  # (B, first side, second side)
    best, partner = similarity.max(2)  # (B, first side)
    merging = best.sort(dim=1, descending=True, stable=True).indices[:, :r]  # (B, r), of the first side
    source = protect + 2 * merging  # (B, r), numbers among all tokens
    target = itself.scatter(1, source, protect + 1 + 2 * partner.gather(1, merging))  # (B, N)
    kept = torch.ones_like(itself).scatter(1, source, 0)
    place = kept.cumsum(1) - 1  # (B, N)
    return place.gather(1, target)
