"""Maps of attention: the weights of the last layer, rollout, and gradient-weighted rollout.

They also work for patches that attend to clusters or are merged.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.explain.inputs import as_batch
from visualtokens.explain.layers import Attention, form_of, record_attention
from visualtokens.grouping import Grouping, Tap, record_groupings
from visualtokens.modes import eval_mode

Grid = tuple[int, int]
Factors = tuple[Tensor, ...]  # A as a product, left to right


def raw_attention(model: nn.Module, x: Tensor) -> Tensor:
    """``(h, w)``: the last attention, mean over the heads, of what the classifier pools."""
    trace = _run(model, x)
    return trace.on_grid(_product(trace.pooled_row(), trace.steps[-1]))


def rollout(model: nn.Module, x: Tensor) -> Tensor:
    """``(h, w)`` on the grid of the first attention: the share of each patch in the pooled feature.

    A block mixes patches by ½ (I + A), where A is its attention, mean over the heads. Rollout (Abnar and
    Zuidema, 2020) is the product of these matrices over all blocks, averaged over the rows that the
    classifier pools. Starting from that row at the last block needs vector-matrix products only.
    ``x (3, H, W)`` is a normalised image. Prefix tokens, such as a class token, take part in the product but
    not in the result.
    """
    return _run(model, x).roll_out()


def _run(model: nn.Module, x: Tensor) -> Trace:
    with (
        eval_mode(model),
        torch.no_grad(),
        recording_groupings(model) as groupings,
        record_attention(groupings) as recorded,
    ):
        model(as_batch(model, x))
    trace = Trace(model, x, recorded, groupings)
    if not trace.steps:
        raise UserError(f"{type(model).__name__} has no attention over patches that could be followed")
    return trace


def recording_groupings(model: nn.Module) -> contextlib.AbstractContextManager[dict[str, Grouping]]:
    """:func:`~visualtokens.record_groupings`, also for models that have none."""
    grouped = any(isinstance(module, Tap) for module in model.modules())
    return record_groupings(model) if grouped else contextlib.nullcontext({})


class Trace:
    """The attention of one forward pass of ``x (3, H, W)``, as matrices that mix patches."""

    def __init__(
        self, model: nn.Module, x: Tensor, recorded: Sequence[Attention], groupings: Mapping[str, Grouping]
    ) -> None:
        self.aspect = x.shape[1] / x.shape[2]
        self.prefix = int(getattr(model, "num_prefix_tokens", 0))
        self.class_token = self.prefix > 0 and getattr(model, "global_pool", "token") == "token"
        self.known = {g.grid[0] * g.grid[1]: g.grid for g in groupings.values()}
        self.steps = _mixing_steps(recorded, groupings, self.prefix)

    def roll_out(self) -> Tensor:
        """``(h, w)``: the product over all layers, of the rows that the classifier pools."""
        row = self.pooled_row()
        for factors in reversed(self.steps):
            row = _propagate(row, factors, self.grid_of, self.prefix)
        return self.on_grid(row)

    def pooled_row(self) -> Tensor:
        """``(1, N)``: the weights with which the classifier pools the outputs of the last attention."""
        return _pooled_row(self.steps[-1], self.prefix, class_token=self.class_token)

    def on_grid(self, row: Tensor) -> Tensor:
        """``(h, w)``: the patches of ``row (1, prefix + N)``."""
        return row[0, self.prefix :].unflatten(0, self.grid_of(row.shape[1] - self.prefix))

    def grid_of(self, patches: int) -> Grid:
        """The rows and columns of a number of patches."""
        return self.known.get(patches) or nearest_grid(patches, self.aspect)


def weighted_by_gradient(
    recorded: Sequence[Attention], gradients: Sequence[Tensor | None]
) -> list[Attention]:
    """Each attention ``(B, heads, N, M)`` as the mean over its heads of (A ⊙ gradient)⁺.

    Rollout of them, R ← R + A R, is a relevance of the patches to a score in the manner of layer-wise
    relevance propagation: the attention that raises the score, followed through the layers.
    """
    return [
        replace(one, weights=(one.weights * (0 if g is None else g)).detach().float().clamp_min(0).mean(1))
        for one, g in zip(recorded, gradients, strict=True)
    ]


def _mixing_steps(
    recorded: Sequence[Attention], groupings: Mapping[str, Grouping], prefix: int
) -> list[Factors]:
    """The factors of every attention through which patches reach patches."""
    steps: list[Factors] = []
    previous: str | None = None
    attended: set[str] = set()  # taps whose clusters the patches attend to
    for attention in recorded:
        weights, tap = attention.weights[0], attention.tap  # (N, M)
        first, previous = tap != previous, tap  # whether it is the first call after its tap
        if tap is None:
            steps.append((weights,))
            continue
        grouping = groupings[tap]
        form, tokens, queries = form_of(grouping), grouping.tokens, weights.shape[0]
        if queries != weights.shape[1]:
            if form == "soft" and weights.shape == grouping.weights.shape[1:]:
                attended.add(tap)
                steps.append((weights, _patches_of_tokens(grouping, prefix=0)))
        elif form == "hard" and queries == prefix + tokens:
            through = _tokens_of_patches(grouping, prefix), weights, _patches_of_tokens(grouping, prefix)
            steps.append(through)
        elif form == "tessellation" and queries == tokens and first:
            steps.append((_tokens_of_patches(grouping, 0), weights, _patches_of_tokens(grouping, 0)))
        elif form != "soft" or queries != tokens or tap in attended:
            steps.append((weights,))
        # else visual tokens attend to each other, which mixes no patches here
    return steps


def _tokens_of_patches(grouping: Grouping, prefix: int) -> Tensor:
    """``(prefix + N, prefix + K)``: the share of each token in a patch."""
    return _with_prefix(_rows_to_one(grouping.dense()[0].float()), prefix)


def _patches_of_tokens(grouping: Grouping, prefix: int) -> Tensor:
    """``(prefix + K, prefix + N)``: the share of each patch in a token."""
    return _with_prefix(_rows_to_one(grouping.dense()[0].float().T), prefix)


def _rows_to_one(weights: Tensor) -> Tensor:
    return weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def _with_prefix(weights: Tensor, prefix: int) -> Tensor:
    return torch.block_diag(torch.eye(prefix, device=weights.device), weights) if prefix else weights


def _pooled_row(last: Factors, prefix: int, *, class_token: bool) -> Tensor:
    """``(1, N)``: the weights with which the classifier pools the outputs of the last attention."""
    queries = last[0].shape[0]
    row = last[0].new_zeros(1, queries)
    if class_token:
        row[0, 0] = 1
    elif queries < last[-1].shape[1]:  # an attention-pooling head: its queries are what is pooled
        row[:] = 1 / queries
    else:
        row[0, prefix:] = 1 / (queries - prefix)
    return row


def _propagate(row: Tensor, factors: Factors, grid_of: Callable[[int], Grid], prefix: int) -> Tensor:
    """``row (1, N)`` times ½ (I + A); with the finer patches of an earlier stage, refined to them first."""
    if factors[0].shape[0] != row.shape[1]:
        row = _refine(row, factors[0].shape[0], grid_of, prefix)
    mixed = _product(row, factors)
    if mixed.shape[1] > row.shape[1]:  # an attention-pooling head has no residual connection
        return mixed
    if mixed.shape[1] < row.shape[1]:  # keys pooled from several patches each (PVTv2)
        mixed = _refine(mixed, row.shape[1], grid_of, prefix)
    return (row + mixed) / 2


def _refine(row: Tensor, patches: int, grid_of: Callable[[int], Grid], prefix: int) -> Tensor:
    """Distribute the weight of each coarse patch evenly over the finer patches it covers."""
    coarse = row[:, prefix:].unflatten(1, grid_of(row.shape[1] - prefix)).unsqueeze(1)  # (1, 1, h, w)
    fine = F.interpolate(coarse, size=grid_of(patches - prefix), mode="nearest-exact").flatten(1)
    return torch.cat((row[:, :prefix], fine * (coarse.sum() / fine.sum())), dim=1)


def _product(row: Tensor, factors: Factors) -> Tensor:
    for factor in factors:
        row = row @ factor
    return row


def nearest_grid(patches: int, aspect: float) -> Grid:
    """The (h, w) with h · w = ``patches`` whose aspect ratio h / w is nearest to the image's."""
    rows = [h for h in range(1, patches + 1) if patches % h == 0]
    best = min(rows, key=lambda h: abs(math.log(h * h / patches / aspect)))
    return best, patches // best
