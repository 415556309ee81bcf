"""Attention rollout (Abnar and Zuidema, 2020), for patches that attend through clusters or tokens too.

Each block mixes patches by ½ (I + A), A being the attention's mean over the heads. Rollout is the product of
these over all blocks, read at what the classifier pools. It is computed from the last block back, as a
row times each factor, so no matrix of all patches by all patches is ever multiplied.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.explain.attention import Attended, record_attention
from visualtokens.explain.classifier import evaluating, input_like, probabilities
from visualtokens.explain.layers import form_of, on_patches
from visualtokens.grouping import Grouping, Tap, record_groupings

Factors = tuple[Tensor, ...]  # of A, left to right; rows sum to 1, and so do those of their product
Grid = tuple[int, int]


def rollout(model: nn.Module, x: Tensor) -> Tensor:
    """``(h, w)`` on the grid of the first attention: how much of what is pooled came from each patch.

    ``x (3, H, W)`` is normalised. A class token, or other tokens before the patches, are followed on the
    way and not part of the result.
    """
    like = input_like(model)
    grouped = any(isinstance(module, Tap) for module in model.modules())
    recording: contextlib.AbstractContextManager[dict[str, Grouping]] = contextlib.nullcontext({})
    if grouped:
        recording = record_groupings(model)
    with evaluating(model), torch.no_grad(), recording as recorded, record_attention(recorded) as attended:
        probabilities(model, x.to(like.device, like.dtype).unsqueeze(0))
    prefix = int(getattr(model, "num_prefix_tokens", 0))
    groupings = on_patches(recorded, (x.shape[1], x.shape[2]))
    steps = _steps(attended, groupings, prefix)
    if not steps:
        raise UserError(f"{type(model).__name__} has no attention over patches that rollout could follow")
    grids = {g.grid[0] * g.grid[1]: g.grid for g in groupings.values()}
    first_token = prefix > 0 and getattr(model, "global_pool", "token") == "token"
    return _follow(steps, _Grids(grids, x.shape[1] / x.shape[2]), prefix, first_token=first_token)


def _steps(attended: Sequence[Attended], groupings: Mapping[str, Grouping], prefix: int) -> list[Factors]:
    """The factors of every attention by which patches reach patches."""
    steps: list[Factors] = []
    before: str | None = None
    read: set[str | None] = set()  # groupings whose clusters the patches attended to
    for one in attended:
        weights, fresh = one.weights[0], one.tap != before  # (N, M)
        before = one.tap
        if one.tap is None:
            steps.append((weights,))
            continue
        grouping = groupings[one.tap]
        square, tokens, form = weights.shape[0] == weights.shape[1], grouping.tokens, form_of(grouping)
        if not square:
            if form == "soft" and weights.shape == grouping.weights.shape[1:]:
                read.add(one.tap)
                steps.append((weights, _made_of(grouping, prefix=0)))
        elif form == "hard" and weights.shape[0] == prefix + tokens:
            steps.append((_belongs_to(grouping, prefix), weights, _made_of(grouping, prefix)))
        elif form == "tessellation" and weights.shape[0] == tokens and fresh:
            steps.append((_belongs_to(grouping, prefix=0), weights, _made_of(grouping, prefix=0)))
        elif form != "soft" or weights.shape[0] != tokens or one.tap in read:
            steps.append((weights,))  # otherwise visual tokens talk, and no patch hears of it here
    return steps


def _made_of(grouping: Grouping, prefix: int) -> Tensor:
    """``(prefix + K, prefix + N)``: the patches that each token is made of."""
    return _extend(_share(grouping.dense()[0].float().T), prefix)


def _belongs_to(grouping: Grouping, prefix: int) -> Tensor:
    """``(prefix + N, prefix + K)``: the tokens that each patch belongs to."""
    return _extend(_share(grouping.dense()[0].float()), prefix)


def _share(weights: Tensor) -> Tensor:
    """Rows that sum to 1."""
    return weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def _extend(weights: Tensor, prefix: int) -> Tensor:
    return torch.block_diag(torch.eye(prefix, device=weights.device), weights) if prefix else weights


class _Grids:
    """The grid of so many patches: as a grouping said, or the nearest to the image's H / W."""

    def __init__(self, known: Mapping[int, Grid], aspect: float) -> None:
        self.known = known
        self.aspect = aspect

    def __call__(self, patches: int) -> Grid:
        return self.known.get(patches) or nearest_grid(patches, self.aspect)


def nearest_grid(patches: int, aspect: float) -> Grid:
    """The (H, W) of so many patches whose H / W is nearest to the image's."""
    rows = [h for h in range(1, patches + 1) if patches % h == 0]
    best = min(rows, key=lambda h: abs(math.log(h * h / patches / aspect)))
    return best, patches // best


def _follow(steps: Sequence[Factors], grids: _Grids, prefix: int, *, first_token: bool) -> Tensor:
    row = steps[-1][0].new_zeros(1, steps[-1][0].shape[0])  # (1, N): what the classifier pools
    if first_token:
        row[0, 0] = 1
    elif steps[-1][0].shape[0] < steps[-1][-1].shape[1]:
        row[:] = 1 / row.shape[1]
    else:
        row[0, prefix:] = 1 / (row.shape[1] - prefix)
    for factors in reversed(steps):
        if factors[0].shape[0] != row.shape[1]:
            row = _refine(row, factors[0].shape[0], grids, prefix)
        mixed = row
        for factor in factors:
            mixed = mixed @ factor
        if mixed.shape[1] > row.shape[1]:  # a head that pools by attention: nothing is passed by
            row = mixed
            continue
        if mixed.shape[1] < row.shape[1]:  # keys that were pooled from a few patches each
            mixed = _refine(mixed, row.shape[1], grids, prefix)
        row = (row + mixed) / 2
    return row[0, prefix:].unflatten(0, grids(row.shape[1] - prefix))


def _refine(row: Tensor, patches: int, grids: _Grids, prefix: int) -> Tensor:
    """From the patches of one stage to the finer ones of the stage before: each hands on evenly."""
    grid, before = grids(row.shape[1] - prefix), grids(patches - prefix)
    spread = F.interpolate(row[:, prefix:].unflatten(1, grid).unsqueeze(1), size=before, mode="nearest-exact")
    spread = spread.flatten(1) * (row[:, prefix:].sum() / spread.sum())
    return torch.cat((row[:, :prefix], spread), dim=1)
