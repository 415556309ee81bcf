"""Fewer tokens where a vision transformer hands over to another model, such as a language model."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from visualtokens.errors import UserError, unknown
from visualtokens.grouping import Grouping
from visualtokens.ops import take
from visualtokens.reduce.methods import METHODS, SIGNIFICANCE, Place, Seen, find_method
from visualtokens.reduce.state import anchors


class Compressed(NamedTuple):
    """The result of :func:`compress`; tokens are in the order of their positions."""

    tokens: Tensor  # (B, prefix + K, C)
    positions: Tensor  # (B, K): the index, among the patches, of the patch whose place each token takes
    grouping: Grouping  # which patches each token stands for


def compress(
    tokens: Tensor,
    k: int,
    *,
    method: str = "kmedoids",
    significance: Tensor | None = None,
    grid: tuple[int, int] | None = None,
    prefix: int = 0,
) -> Compressed:
    """Reduce the tokens of an image to K, after the model that computed them.

    >>> features = clip(pixel_values).last_hidden_state
    >>> tokens, positions, grouping = visualtokens.compress(features, 64, prefix=1)

    ``tokens (B, prefix + N, C)``; the first ``prefix`` are kept. ``grid`` is the grid (H, W) of the N others,
    by default a square. The new tokens keep the order of the image: ``positions`` increases, and is what
    position ids or rotary positions of a following model refer to. :func:`visualtokens.unmerge` takes the
    grouping.

    ``method`` is one of :data:`visualtokens.reduce.METHODS`. The default, k-medoids, keeps K of the tokens
    unchanged, at their own places; methods that join tokens return means, at the place of the patch nearest
    to the centre of each group. ``significance (B, N)`` are weights of the tokens, such as the attention they
    receive; weighted methods and ``power_bert`` need them.
    """
    if tokens.ndim != 3:
        raise UserError(f"tokens has shape {tuple(tokens.shape)}; give (B, N, C)")
    patches = tokens[:, prefix:]
    b, n, dim = patches.shape
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    if not 1 <= k <= n:
        raise UserError(f"k={k} of {n} tokens; give 1 to {n}")
    grid = grid or _square(n)
    if math.prod(grid) != n:
        raise UserError(
            f"grid={grid} has {math.prod(grid)} places for {n} tokens; give their rows and columns"
        )
    factory, fit = find_method(method)
    if fit is not None:
        raise UserError(f"{method} learns its weights, so it works inside a model only; use another method")
    pool = factory(Place(0, dim, n, n, k)).to(tokens)
    if pool.needs >= SIGNIFICANCE and significance is None:
        raise UserError(f"{method} weighs tokens; give significance (B, N), or use kmedoids, kmeans or merge")
    if significance is not None and significance.shape != (b, n):
        raise UserError(f"significance has shape {tuple(significance.shape)}; give {(b, n)}, one per token")
    seen = Seen(significance=significance, keys=None, size=None, cells=grid, assign=True)
    pooled = pool(patches, k, seen)
    if pooled.assignment is None:
        raise ValueError("the pool returned no assignment although Seen.assign was set")
    new = pooled.tokens if pooled.tokens is not None else take(patches, _chosen(pooled.chosen))
    places = anchors(None, pooled, pooled.assignment, k, grid)  # (B, K)
    positions, order = places.sort(dim=1)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(k, device=order.device).expand_as(order))
    source = pooled.assignment
    source = torch.where(source < 0, -1, rank.gather(1, source.clamp_min(0)))
    return Compressed(
        torch.cat((tokens[:, :prefix], take(new, order)), dim=1),
        positions,
        Grouping.hard_from(source, k, grid),
    )


def _chosen(chosen: Tensor | None) -> Tensor:
    if chosen is None:
        raise ValueError("a pool must return new tokens or the indices of the chosen ones")
    return chosen


def _square(n: int) -> tuple[int, int]:
    side = math.isqrt(n)
    if side**2 != n:
        raise UserError(f"{n} tokens do not form a square; give grid=(rows, columns), and prefix")
    return side, side
