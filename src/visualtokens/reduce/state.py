"""What travels from block to block besides the tokens, how pooling updates it, and the way back to patches.

A forward pass creates its own state and hands it on; nothing is kept on a module.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from visualtokens.errors import UserError
from visualtokens.grouping import Grouping
from visualtokens.ops import group_mean, take, ungroup
from visualtokens.ops.clustering import cheapest
from visualtokens.reduce.methods import Pooled


class State(NamedTuple):
    """The K tokens of B images at some depth, in terms of their N patches. Prefix tokens are not counted."""

    grid: tuple[int, int]  # (H, W) of the patches
    cells: tuple[int, int]  # grid of the tokens, as long as they form one
    track: bool  # whether to keep `source` up to date
    source: Tensor | None = None  # (B, N): token of each patch, -1 if dropped; None: each patch is a token
    size: Tensor | None = None  # (B, K): patches per token; None: one each
    anchor: Tensor | None = None  # (B, K): the patch whose position each token has; None: its own


def advance(state: State, pooled: Pooled, k: int, *, carry: bool, joins: bool, anchored: bool) -> State:
    """The state after a pool to K tokens.

    ``carry``: whether sizes are carried; ``joins``: :attr:`Pool.joins`; ``anchored``: whether attention needs
    the position of each token.
    """
    source, size, anchor = state.source, state.size, state.anchor
    if state.track:
        source = _compose(source, _assignment(pooled))
    if carry and joins:
        size = _sizes(size, _assignment(pooled), k)
    elif size is not None and pooled.chosen is not None:
        size = size.gather(1, pooled.chosen)
    if anchored:
        anchor = anchors(anchor, pooled, source, k, state.grid)
    return State(state.grid, pooled.cells or state.cells, state.track, source, size, anchor)


def _assignment(pooled: Pooled) -> Tensor:
    if pooled.assignment is None:
        raise ValueError("the pool returned no assignment although Seen.assign was set")
    return pooled.assignment


def _compose(source: Tensor | None, assignment: Tensor) -> Tensor:
    """The new token of each patch ``(B, N)``, from ``source (B, N)`` and ``assignment (B, n)``."""
    if source is None or assignment.shape[1] == 0:
        return assignment if source is None else source
    return torch.where(source < 0, -1, assignment.gather(1, source.clamp_min(0)))


def _sizes(size: Tensor | None, assignment: Tensor, k: int) -> Tensor:
    """Sums of ``size (B, n)`` over the groups of ``assignment (B, n)``: ``(B, K)``."""
    if k == 0:
        return torch.zeros_like(assignment[:, :0], dtype=torch.float32)
    size = torch.ones_like(assignment, dtype=torch.float32) if size is None else size
    return size.new_zeros(size.shape[0], k).scatter_add(1, assignment, size)


def anchors(
    anchor: Tensor | None, pooled: Pooled, source: Tensor | None, k: int, grid: tuple[int, int]
) -> Tensor:
    """The patch whose position each token has, ``(B, K)``.

    A chosen token keeps its own. A joined token takes the patch nearest to the centroid of its patches (the
    first on ties): a position that exists, inside its region.
    """
    if pooled.chosen is not None:
        return pooled.chosen if anchor is None else anchor.gather(1, pooled.chosen)
    if source is None:
        raise ValueError("positions of new tokens need the source map: set track")
    if k == 0:
        return source[:, :0]
    positions = patch_positions(grid, source.device).expand(source.shape[0], -1, -1)  # (B, N, 2)
    centroid, _ = group_mean(positions, source, k)  # (B, K, 2)
    token = source.clamp_min(0)
    distance = (positions - take(centroid, token)).square().sum(2)  # (B, N)
    distance = torch.where(source < 0, torch.inf, distance)
    return cheapest(distance, token, source.new_zeros(source.shape[0], k))


def patch_positions(grid: tuple[int, int], device: torch.device) -> Tensor:
    """Row and column of each patch, ``(N, 2)``."""
    rows, columns = (torch.arange(side, device=device, dtype=torch.float32) for side in grid)
    return torch.cartesian_prod(rows, columns)


def spread(x: Tensor, state: State, prefix: int) -> Tensor:
    """Copy each token of ``x (B, prefix + K, C)`` to its patches, ``(B, prefix + N, C)``; 0 if dropped."""
    if state.source is None:
        return x
    return torch.cat((x[:, :prefix], ungroup(x[:, prefix:], state.source)), dim=1)


def grouping_of(state: State, tokens: Tensor) -> Grouping:
    """Which patches the ``tokens (B, K, C)`` stand for."""
    b, k, _ = tokens.shape
    source = state.source
    if source is None:
        source = torch.arange(state.grid[0] * state.grid[1], device=tokens.device).expand(b, -1)
    return Grouping.hard_from(source, k, state.grid)


def unmerge(features: Tensor, grouping: Grouping) -> Tensor:
    """Copy each token's feature to its patches: ``(B, K, C)`` becomes ``(B, N, C)``, zeros if dropped.

    >>> with record_groupings(model) as groupings:
    ...     model(images)
    >>> unmerge(features, groupings["blocks.5.reduction.tap"])

    Prefix tokens at the front of ``features (B, prefix + K, C)`` are left out. The outputs of a reduced model
    (``forward_features``, ``forward_intermediates``) have all patches already; use this for features from
    forward hooks and from :func:`~visualtokens.reduce.forward_tokens`.
    """
    prefix = features.shape[1] - grouping.tokens
    if prefix < 0:
        raise UserError(
            f"{features.shape[1]} features for {grouping.tokens} tokens; give the features of this grouping"
        )
    return ungroup(features[:, prefix:], grouping.hard())
