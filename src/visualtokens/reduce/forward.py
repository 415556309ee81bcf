"""The forward passes of a reduced model, in place of timm's methods of the same names.

Inside there are fewer and fewer tokens. What leaves the model has one feature for every patch, as the
plain model's: a patch has that of the token that stands for it. So shapes are those of the plain model,
and an average or an attention over the patches weighs every token by its patches. A patch that was
dropped has a feature of zeros, and pooling leaves it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from timm.layers import global_pool_nlc
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from timm.models.eva import Eva
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.grouping import Grouping
from visualtokens.ops import ungroup
from visualtokens.reduce.state import State, grouping_of


class Encoded(NamedTuple):
    """The tokens behind some block: ``x (B, prefix + K, C)``."""

    x: Tensor
    state: State


class Tokens(NamedTuple):
    """What :func:`forward_tokens` gives: the few tokens themselves."""

    prefix: Tensor  # (B, prefix, C): class token, registers
    tokens: Tensor  # (B, K, C)
    grouping: Grouping  # which patches they stand for


def forward(
    model: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """In place of timm's ``forward``. A head that reads nothing but prefix tokens gets the rest as it is."""
    if model.global_pool == "token" and model.attn_pool is None:
        _refuse_masks(attn_mask, is_causal)
        return model.forward_head(model.norm(encode(model, x, track=False)[0].x))
    return model.forward_head(model.forward_features(x, attn_mask=attn_mask, is_causal=is_causal))


def forward_features(
    model: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """In place of timm's: ``(B, prefix + N, C)``, one feature for every patch."""
    _refuse_masks(attn_mask, is_causal)
    last, _ = encode(model, x, track=True)
    return spread(model, Encoded(model.norm(last.x), last.state))


def forward_tokens(model: nn.Module, images: Tensor) -> Tokens:
    """The tokens of a reduced model, normalised, for those who want few: ``(B, K, C)``."""
    own: Any = model
    if "reduction" not in own.__dict__:
        raise UserError(f"this {type(model).__name__} is not reduced; call visualtokens.reduce on it first")
    last, _ = encode(own, images, track=True)
    x, prefix = own.norm(last.x), own.num_prefix_tokens
    return Tokens(x[:, :prefix], x[:, prefix:], grouping_of(last.state, x[:, prefix:]))


def forward_intermediates(
    model: Any,
    x: Tensor,
    indices: int | list[int] | None = None,
    return_prefix_tokens: bool = False,
    norm: bool = False,
    stop_early: bool = False,
    output_fmt: str = "NCHW",
    intermediates_only: bool = False,
    output_dict: bool = False,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Any:
    """In place of timm's, with its arguments and results; every map has all patches."""
    _refuse_masks(attn_mask, is_causal)
    if output_fmt not in ("NCHW", "NLC"):
        raise UserError(f"output_fmt={output_fmt!r}; give 'NCHW' or 'NLC'")
    wanted, highest = feature_take_indices(len(model.blocks), indices)
    last, taken = encode(model, x, track=True, take=wanted, blocks=highest + 1 if stop_early else None)
    if norm:
        taken = [Encoded(model.norm(encoded.x), encoded.state) for encoded in taken]
    prefix = model.num_prefix_tokens
    every = [spread(model, encoded) for encoded in taken]  # (B, prefix + N, C)
    maps = [features[:, prefix:] for features in every]
    if output_fmt == "NCHW":
        maps = [m.mT.unflatten(2, last.state.grid).contiguous() for m in maps]
    final = None if intermediates_only else spread(model, Encoded(model.norm(last.x), last.state))
    prefixes = [features[:, :prefix] for features in every] if prefix and return_prefix_tokens else None
    if output_dict:
        named = dict(image_intermediates=maps, image_intermediates_prefix=prefixes, image_features=final)
        return {name: value for name, value in named.items() if value is not None}
    out = maps if prefixes is None else list(zip(maps, prefixes, strict=True))
    return out if final is None else (final, out)


def encode(
    model: Any, images: Tensor, *, track: bool, take: Sequence[int] = (), blocks: int | None = None
) -> tuple[Encoded, list[Encoded]]:
    """The tokens behind the last block, and behind those in ``take``.

    ``track`` asks for the source map; ``blocks`` stops behind so many. Whatever has to be known of the
    tokens goes from block to block here, and nowhere else.
    """
    x, rope = _embed(model, images)  # (B, prefix + N, C)
    grid = model.patch_embed.dynamic_feat_size(tuple(images.shape[2:]))
    keep = model.reduction.schedule.tokens(grid[0] * grid[1])
    chain = list(model.blocks)[:blocks]
    # New tokens of a model with rotary positions need to know where their patches are.
    track = track or rope is not None or any(block.reduction.tap.wanted() for block in chain)
    state = State(grid=grid, cells=grid, track=track)
    taken = []
    for i, block in enumerate(chain):
        place = rope[i] if rope is not None and model.rope_mixed else rope
        if model.grad_checkpointing:
            x, state = checkpoint(block, x, state, keep[i], place)
        else:
            x, state = block(x, state, keep[i], place)
        if i in take:
            taken.append(Encoded(x, state))
    return Encoded(x, state), taken


def _embed(model: Any, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """Patches and prefix tokens with their positions, and EVA's rotary positions."""
    x = model.patch_embed(images)
    if isinstance(model, Eva):
        x, rope = model._pos_embed(x)
        return model.norm_pre(x), rope
    return model.norm_pre(model.patch_drop(model._pos_embed(x))), None


def spread(model: Any, encoded: Encoded) -> Tensor:
    """Every patch gets the feature of its token, ``(B, prefix + N, C)``; zeros for a dropped patch."""
    x, source = encoded.x, encoded.state.source
    if source is None:
        return x
    prefix = model.num_prefix_tokens
    return torch.cat((x[:, :prefix], ungroup(x[:, prefix:], source)), dim=1)


def pool(model: Any, x: Tensor, pool_type: str | None = None) -> Tensor:
    """In place of timm's, for methods that drop: over the patches that are left."""
    prefix = model.num_prefix_tokens
    include = getattr(model, "pool_include_prefix", isinstance(model, Eva) and model.attn_pool is not None)
    tokens = x if include else x[:, prefix:]
    there = tokens.any(2)  # (B, N): a dropped patch is all zeros
    if model.attn_pool is not None:
        bias = torch.zeros_like(there, dtype=x.dtype).masked_fill(~there, -torch.inf)
        return model.attn_pool(tokens, attn_mask=bias.unsqueeze(1).unsqueeze(1))
    kind = model.global_pool if pool_type is None else pool_type
    if kind not in ("avg", "avgmax", "max"):
        return global_pool_nlc(x, pool_type=kind, num_prefix_tokens=prefix)
    mean = tokens.sum(1) / there.sum(1, keepdim=True)
    if kind == "avg":
        return mean
    highest = tokens.masked_fill(~there.unsqueeze(2), -torch.inf).amax(1)
    return highest if kind == "max" else 0.5 * (highest + mean)


def _refuse_masks(attn_mask: Tensor | None, is_causal: bool) -> None:
    if attn_mask is not None or is_causal:
        raise UserError(
            "an attention mask speaks of patches, and tokens of a reduced model are fewer; restore it first"
        )
