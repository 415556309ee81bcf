"""Token merging: by bipartite soft matching, and by what each token costs to lose."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visualtokens.ops.distances import origin, squared_distances
from visualtokens.ops.groups import group_mean, group_sum, take
from visualtokens.ops.numerics import check_finite, no_autocast, upcast
from visualtokens.ops.seeds import highest, top_k

# One round of nearest_merge may drop this share of the tokens, or this many if that is more.
ROUND_SHARE, ROUND_TOKENS = 1 / 4, 8


class Merged(NamedTuple):
    tokens: Tensor  # (B, K, C): K = N − r
    size: Tensor  # (B, K): patches per token
    assignment: Tensor  # (B, N): the new token of each old one, for `ungroup(tokens, assignment)`


def nearest_merge(
    x: Tensor,
    k: int,
    *,
    metric: Tensor | None = None,
    weights: Tensor | None = None,
    size: Tensor | None = None,
    threshold: float | None = None,
) -> Merged:
    """Merge the N tokens of ``x (B, N, C)`` into K: the cheapest to lose join the nearest token that is kept.

    A token costs more to lose the more it weighs and the farther the nearest token j is that can replace it:

        cost_i = w_i ‖m_i − m_j‖

    for ``metric`` m ``(B, N, D)``, which defaults to x, and ``weights`` w ``(B, N)``, which default to ones
    and must not be negative. If j is cheaper than i, and so would be dropped first, i's second nearest token
    counts. A round drops at most a quarter of the tokens, or eight, so that costs stay true; rounds are
    repeated until K are left. A new token is the :func:`mean_direction` of its group. The order is that of
    the kept tokens. ``size (B, N)``, by default ones, is summed. Gradients reach x through the means, not
    through the choice. ``k >= N`` changes nothing.

    With ``threshold`` more than K may stay: as many as the image needs, or the neediest image of a batch.
    Merging ends as soon as no token costs less than ``threshold`` times √2 · mean w · mean ‖m‖, about the
    cost of a token that no other resembles.
    """
    check_finite("nearest_merge", x=x, metric=metric, weights=weights, size=size)
    b, n, _ = x.shape
    if k < 1:
        raise ValueError(f"k={k}; at least one token must stay")
    size = upcast(x).new_ones(b, n) if size is None else size
    if k >= n:
        return Merged(x, size, torch.arange(n, device=x.device).expand(b, n))
    metric = x if metric is None else metric
    assignment, k = nearest_groups(metric, k, weights=weights, threshold=threshold)
    total = size.new_zeros(b, k).scatter_add(1, assignment, size)  # (B, K)
    return Merged(mean_direction(x, assignment, k, weights=weights), total, assignment)


def mean_direction(x: Tensor, assignment: Tensor, k: int, *, weights: Tensor | None = None) -> Tensor:
    """The direction of the weighted mean of each group times the weighted mean of its norms: ``(B, K, C)``.

    ``x (B, N, C)``; ``assignment (B, N)`` without -1; ``weights (B, N)`` default to ones. The plain mean of
    different tokens is shorter than each of them, and the layers that follow notice.
    """
    values = upcast(x)
    w = _positive(weights, values)  # (B, N)
    total = group_sum(values * w.unsqueeze(2), assignment, k)  # (B, K, C)
    weight, length = (
        w.new_zeros(x.shape[0], k).scatter_add(1, assignment, part) for part in (w, w * values.norm(dim=2))
    )  # (B, K)
    scale = length / weight / total.norm(dim=2).clamp_min(1e-30)  # opposite tokens cancel to zero
    return (total * scale.unsqueeze(2)).to(x.dtype)


def _positive(weights: Tensor | None, like: Tensor) -> Tensor:
    """The weights ``(B, N)`` of tokens ``like (B, N, C)``, not zero: a group of zero weight has no mean."""
    return like.new_ones(like.shape[:2]) if weights is None else weights.to(like).clamp_min(1e-20)


@torch.no_grad()
def nearest_groups(
    metric: Tensor, k: int, *, weights: Tensor | None = None, threshold: float | None = None
) -> tuple[Tensor, int]:
    """The groups of :func:`nearest_merge`: the index of each token's nearest kept token ``(B, N)``, and K."""
    b, n, _ = metric.shape
    points = upcast(metric)
    weights = _positive(weights, points)
    distance = squared_distances(points - origin(points))  # (B, N, N)
    own = torch.eye(n, dtype=torch.bool, device=metric.device)
    distance = distance.masked_fill(own, torch.inf)  # no token can replace itself
    enough = None
    if threshold is not None:
        # distance of unrelated tokens of this length
        alone = 2**0.5 * points.norm(dim=2).mean(1, keepdim=True)
        enough = threshold * alone * weights.mean(1, keepdim=True)  # (B, 1)
    kept, among = None, distance
    while among.shape[1] > k:
        present = among.shape[1]
        cost = _costs_to_lose(among, weights if kept is None else weights.gather(1, kept))  # (B, present)
        fewest = k if enough is None else max(k, int((cost >= enough).sum(1).max()))
        if fewest >= present:
            break
        stay = top_k(cost, max(fewest, present - max(ROUND_TOKENS, int(present * ROUND_SHARE))))
        kept = stay if kept is None else kept.gather(1, stay)
        if kept.shape[1] == fewest and enough is None:
            break
        among = take(take(distance, kept).mT, kept)  # (B, stay, stay); the distances are symmetric
    if kept is None:
        return torch.arange(n, device=metric.device).expand(b, n), n
    assignment, k = take(distance, kept).min(1).indices, kept.shape[1]  # (B, N)
    # a kept token is its own, even if another kept one is equal to it
    return assignment.scatter(1, kept, torch.arange(k, device=metric.device).expand_as(kept)), k


def _costs_to_lose(squared: Tensor, w: Tensor) -> Tensor:
    """w_i · distance to the nearest token, or to the second nearest if the nearest is cheaper: ``(B, N)``.

    ``squared (B, N, N)`` are squared distances, infinite on the diagonal.
    """
    first, nearest = squared.min(2)  # (B, N)
    second = squared.scatter(2, nearest.unsqueeze(2), torch.inf).amin(2)  # infinite if there are only two
    # of two equal tokens, the one that weighs less is cheaper to lose
    cost = w * first.clamp_min(1e-24).sqrt()
    return torch.where(cost > cost.gather(1, nearest), w * second.sqrt(), cost)


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
    merging = highest(best, r)  # (B, r), within the first set
    source = protect + 2 * merging  # (B, r), among all tokens
    target = itself.scatter(1, source, protect + 1 + 2 * partner.gather(1, merging))  # (B, N)
    kept = torch.ones_like(itself).scatter(1, source, 0)
    new_index = kept.cumsum(1) - 1  # (B, N), of kept tokens
    return new_index.gather(1, target)
