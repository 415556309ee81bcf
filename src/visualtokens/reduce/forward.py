"""The forward passes of a reduced model, which replace timm's methods of the same names.

Between the blocks there are fewer and fewer tokens. The outputs have one feature per patch, as those of the
plain model: each patch gets the feature of its token. Average and attention pooling thus weigh every token
by its number of patches. A dropped patch has a feature of zeros, and pooling ignores it.
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
from visualtokens.reduce.attention import Positions
from visualtokens.reduce.state import State, grouping_of, spread

# The methods of a timm model that reduction replaces; a subclass must not override them.
REPLACED = ("forward", "forward_features", "forward_intermediates", "pool")


class Tokens(NamedTuple):
    """The result of :func:`forward_tokens`."""

    prefix: Tensor  # (B, prefix, C): class token, registers
    tokens: Tensor  # (B, K, C)
    grouping: Grouping  # which patches each token stands for


def encode(
    model: Any, images: Tensor, *, track: bool, take: Sequence[int] = (), blocks: int | None = None
) -> tuple[Tensor, State, list[tuple[Tensor, State]]]:
    """The tokens ``(B, prefix + K, C)`` and the state after the last block, and after each block in ``take``.

    ``track`` computes the source map; ``blocks`` is the number of blocks to run, all by default.
    """
    x, state, positions = embed(model, images, track=track)
    keep = model.reduction.schedule.tokens(state.grid[0] * state.grid[1])
    taken = []
    for i in range(len(model.blocks) if blocks is None else blocks):
        x, state = run_block(model, i, x, state, keep[i], positions)
        if i in take:
            taken.append((x, state))
    return x, state, taken


def embed(model: Any, images: Tensor, *, track: bool) -> tuple[Tensor, State, Positions]:
    """The tokens before the first block, their state, and the positions of the patches."""
    x, rope = _embed(model, images)  # (B, prefix + N, C)
    grid = model.patch_embed.dynamic_feat_size(tuple(images.shape[2:]))
    # rotary positions of joined tokens are computed from the source map
    track = track or rope is not None or any(block.reduction.tap.wanted() for block in model.blocks)
    return x, State(grid=grid, cells=grid, track=track), Positions(rope)


def run_block(
    model: Any, index: int, x: Tensor, state: State, keep: int, positions: Positions
) -> tuple[Tensor, State]:
    """The tokens and the state after block ``index``, which keeps at most ``keep`` tokens."""
    if positions.rope is not None and model.rope_mixed:
        positions = Positions(positions.rope[index])
    if model.grad_checkpointing:
        return checkpoint(model.blocks[index], x, state, keep, positions)
    return model.blocks[index](x, state, keep, positions)


def read_out(model: Any, x: Tensor, state: State) -> Tensor:
    """The model's output for the tokens ``x (B, prefix + K, C)`` after the last block."""
    x = model.norm(x)
    return model.forward_head(x if reads_prefix_only(model) else spread(x, state, model.num_prefix_tokens))


def reads_prefix_only(model: Any) -> bool:
    """Whether the head reads the prefix tokens only, so that no patch matters after the last attention."""
    return model.global_pool == "token" and model.attn_pool is None and model.num_prefix_tokens > 0


def _embed(model: Any, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """Prefix and patch tokens ``(B, prefix + N, C)``, and the rotary positions of an Eva model."""
    x = model.patch_embed(images)
    if isinstance(model, Eva):
        x, rope = model._pos_embed(x)
        return model.norm_pre(x), rope
    return model.norm_pre(model.patch_drop(model._pos_embed(x))), None


def forward(
    model: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Replaces timm's ``forward``."""
    if reads_prefix_only(model):
        _refuse_masks(attn_mask, is_causal)
        x, state, _ = encode(model, x, track=False)
        return read_out(model, x, state)
    return model.forward_head(model.forward_features(x, attn_mask=attn_mask, is_causal=is_causal))


def forward_features(
    model: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Replaces timm's ``forward_features``: ``(B, prefix + N, C)``, one feature per patch."""
    _refuse_masks(attn_mask, is_causal)
    x, state, _ = encode(model, x, track=True)
    return spread(model.norm(x), state, model.num_prefix_tokens)


def forward_tokens(model: nn.Module, images: Tensor) -> Tokens:
    """The normalised tokens ``(B, K, C)`` after the last block of a reduced model, and their patches."""
    own: Any = model
    if "reduction" not in own.__dict__:
        raise UserError(f"this {type(model).__name__} is not reduced; call visualtokens.reduce on it first")
    x, state, _ = encode(own, images, track=True)
    x, prefix = own.norm(x), own.num_prefix_tokens
    return Tokens(x[:, :prefix], x[:, prefix:], grouping_of(state, x[:, prefix:]))


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
    """Replaces timm's ``forward_intermediates``, same arguments and results; each map has all patches."""
    _refuse_masks(attn_mask, is_causal)
    if output_fmt not in ("NCHW", "NLC"):
        raise UserError(f"output_fmt={output_fmt!r}; give 'NCHW' or 'NLC'")
    take, last = feature_take_indices(len(model.blocks), indices)
    x, state, taken = encode(model, x, track=True, take=take, blocks=last + 1 if stop_early else None)
    if norm:
        taken = [(model.norm(tokens), then) for tokens, then in taken]
    prefix = model.num_prefix_tokens
    features = [spread(tokens, then, model.num_prefix_tokens) for tokens, then in taken]  # (B, prefix + N, C)
    maps = [f[:, prefix:] for f in features]
    if output_fmt == "NCHW":
        maps = [m.mT.unflatten(2, state.grid).contiguous() for m in maps]  # (B, C, H, W)
    final = None if intermediates_only else spread(model.norm(x), state, model.num_prefix_tokens)
    prefixes = [f[:, :prefix] for f in features] if prefix and return_prefix_tokens else None
    if output_dict:
        named = dict(image_intermediates=maps, image_intermediates_prefix=prefixes, image_features=final)
        return {name: value for name, value in named.items() if value is not None}
    out = maps if prefixes is None else list(zip(maps, prefixes, strict=True))
    return out if final is None else (final, out)


def pool(model: Any, x: Tensor, pool_type: str | None = None) -> Tensor:
    """Replaces timm's ``pool`` for methods that drop tokens: pools over the patches that were kept."""
    prefix = model.num_prefix_tokens
    include = getattr(model, "pool_include_prefix", isinstance(model, Eva) and model.attn_pool is not None)
    tokens = x if include else x[:, prefix:]
    kept = tokens.any(2)  # (B, N): a dropped patch is all zeros
    if model.attn_pool is not None:
        bias = torch.zeros_like(kept, dtype=x.dtype).masked_fill(~kept, -torch.inf)
        return model.attn_pool(tokens, attn_mask=bias.unsqueeze(1).unsqueeze(1))
    kind = model.global_pool if pool_type is None else pool_type
    if kind not in ("avg", "avgmax", "max"):
        return global_pool_nlc(x, pool_type=kind, num_prefix_tokens=prefix)
    mean = tokens.sum(1) / kept.sum(1, keepdim=True)
    if kind == "avg":
        return mean
    highest = tokens.masked_fill(~kept.unsqueeze(2), -torch.inf).amax(1)
    return highest if kind == "max" else 0.5 * (highest + mean)


def _refuse_masks(attn_mask: Tensor | None, is_causal: bool) -> None:
    if attn_mask is not None or is_causal:
        raise UserError(
            "attention masks refer to patches, which a reduced model merges or drops; restore it first"
        )
