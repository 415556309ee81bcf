"""What goes from block to block beside the tokens, and how pooling changes it.

Nothing of it is ever kept on a module: it is made anew in every forward pass and handed on by the caller.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from visualtokens.errors import UserError
from visualtokens.grouping import Grouping, Tap
from visualtokens.ops import group_mean, take, ungroup
from visualtokens.ops.k_medoids import cheapest


class State(NamedTuple):
    """B images, N patches, K tokens at this depth; prefix tokens (class, registers) are not among them."""

    grid: tuple[int, int]  # (H, W) of the patches
    cells: tuple[int, int]  # of the tokens, as long as they form a grid
    track: bool  # whether somebody wants to know `source`
    source: Tensor | None = None  # (B, N): the token of each patch, -1 for none; None: each has its own
    size: Tensor | None = None  # (B, K): how many patches each token stands for; None: one each
    anchor: Tensor | None = None  # (B, K): the patch whose position each token keeps; None: its own


class Pooled(NamedTuple):
    """What a pooling made of n tokens: K that are new, or K chosen among them."""

    tokens: Tensor | None = None  # (B, K, C), or None: the chosen ones
    chosen: Tensor | None = None  # (B, K): which tokens were chosen
    assignment: Tensor | None = None  # (B, n): where each went, -1 for nowhere; only if asked for
    cells: tuple[int, int] | None = None  # the grid of the new tokens, if they form one


def advance(state: State, pooled: Pooled, k: int, *, carry: bool, joins: bool, positions: bool) -> State:
    """The state behind a pooling to K tokens, which joins them or drops some."""
    source, size, anchor = state.source, state.size, state.anchor
    if state.track:
        source = _compose(source, _asked(pooled))
    if carry and joins:
        size = _sizes(size, pooled, k)
    elif size is not None and pooled.chosen is not None:
        size = size.gather(1, pooled.chosen)
    if positions:
        anchor = _anchors(anchor, pooled, source, k, state.grid)
    return State(state.grid, pooled.cells or state.cells, state.track, source, size, anchor)


def _asked(pooled: Pooled) -> Tensor:
    if pooled.assignment is None:
        raise ValueError("the pooling was asked where its tokens went and does not say")
    return pooled.assignment


def _compose(source: Tensor | None, assignment: Tensor) -> Tensor:
    """The token of each patch, from the token it had and where that went: ``(B, N)``."""
    if source is None or assignment.shape[1] == 0:
        return assignment if source is None else source
    return torch.where(source < 0, -1, assignment.gather(1, source.clamp_min(0)))


def _sizes(size: Tensor | None, pooled: Pooled, k: int) -> Tensor | None:
    """``(B, K)``: what joins adds up."""
    assignment = _asked(pooled)  # (B, n)
    if k == 0:
        return torch.zeros_like(assignment[:, :0], dtype=torch.float32)
    one = torch.ones_like(assignment, dtype=torch.float32) if size is None else size
    return one.new_zeros(one.shape[0], k).scatter_add(1, assignment, one)


def _anchors(
    anchor: Tensor | None, pooled: Pooled, source: Tensor | None, k: int, grid: tuple[int, int]
) -> Tensor:
    """The patch whose rotary position a token keeps, ``(B, K)``.

    A chosen token keeps its own. A token made of several takes that of the patch nearest to the middle of
    all patches it stands for (the first on ties): a position that exists, inside its region.
    """
    if pooled.chosen is not None:
        return pooled.chosen if anchor is None else anchor.gather(1, pooled.chosen)
    if source is None:
        raise ValueError("positions of new tokens need the source map: set track")
    place = patch_positions(grid, source.device).expand(source.shape[0], -1, -1)  # (B, N, 2)
    middle, _ = group_mean(place, source, k)  # (B, K, 2)
    mine = source.clamp_min(0)
    away = (place - take(middle, mine)).square().sum(2) if k else place.new_zeros(source.shape)  # (B, N)
    away = torch.where(source < 0, torch.inf, away)
    return cheapest(away, mine, source.new_zeros(source.shape[0], k)) if k else source[:, :0]


def patch_positions(grid: tuple[int, int], device: torch.device) -> Tensor:
    """Row and column of each patch, ``(N, 2)``."""
    rows, columns = (torch.arange(side, device=device, dtype=torch.float32) for side in grid)
    return torch.cartesian_prod(rows, columns)


def grouping_of(state: State, tokens: Tensor) -> Grouping:
    """Which patches the ``tokens (B, K, C)`` stand for."""
    b, k, _ = tokens.shape
    source = state.source
    if source is None:
        source = torch.arange(state.grid[0] * state.grid[1], device=tokens.device).expand(b, -1)
    return Grouping.hard_from(source, k, state.grid)


def emit(tap: Tap, state: State, tokens: Tensor) -> None:
    """Hand :func:`grouping_of` to whoever listens."""
    grouping = grouping_of(state, tokens)
    tap(grouping.weights, grouping.grid, grouping.size, grouping.index)


def unmerge(features: Tensor, grouping: Grouping) -> Tensor:
    """Give every patch the feature of its token: ``(B, K, C)`` becomes ``(B, N, C)``, zeros where nobody is.

    >>> with record_groupings(model) as groupings:
    ...     model(images)
    >>> unmerge(features, groupings["blocks.5.reduction.tap"])

    Prefix tokens at the front of ``features (B, prefix + K, C)`` are left out. What a reduced model gives
    out by itself (``forward_features``, ``forward_intermediates``) has all patches already; this is for
    what hooks see inside, and for :func:`~visualtokens.reduce.forward_tokens`.
    """
    prefix = features.shape[1] - grouping.tokens
    if prefix < 0:
        raise UserError(
            f"{features.shape[1]} features for {grouping.tokens} tokens; give those of this grouping"
        )
    return ungroup(features[:, prefix:], grouping.hard())
