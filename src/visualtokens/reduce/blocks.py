"""A reduced block: attention, pool, MLP; and which models have blocks that can be reduced.

x ← x + attention(x)
x ← pool(x, K)          Token Pooling
x ← x + MLP(x)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers.diff_attention import DiffAttention
from timm.models import VisionTransformer
from timm.models import vision_transformer as vit
from timm.models._features import FeatureGetterNet
from timm.models.eva import Eva, EvaBlock, EvaBlockPostNorm
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.grouping import Tap
from visualtokens.ops import take
from visualtokens.reduce.attention import Attended, attention, is_supported
from visualtokens.reduce.methods import NOTHING, Pool, Pooled, Seen, keep_none
from visualtokens.reduce.state import State, advance, grouping_of


class BlockReduction(nn.Module):
    """The reduction of one block, added to it as its child ``reduction``.

    It has parameters only if the method learns some: ``alpha`` (Appendix F) and those of the pool.
    """

    alpha: nn.Parameter | float | None

    def __init__(
        self, pool: Pool, *, prefix: int, carry: bool, alpha: nn.Parameter | float | None = None
    ) -> None:
        super().__init__()
        self.pool = pool
        self.prefix = prefix
        self.carry = carry
        self.alpha = alpha
        self.tap = Tap()


def reduced_forward(
    block: nn.Module, x: Tensor, state: State, keep: int, rope: Tensor | None = None
) -> tuple[Tensor, State]:
    """The block's output ``(B, prefix + K, C)`` for ``x (B, prefix + n, C)``, and the new state.

    ``keep`` is the largest K allowed; ``rope`` holds the rotary positions of all patches.
    """
    own: Any = block
    reduction: BlockReduction = own.reduction
    prefix, pool, carry = reduction.prefix, reduction.pool, reduction.carry
    attention_half, mlp_half = HALVES[type(block).forward]

    active = pool.acts(x.shape[1] - prefix, keep)
    attend = partial(
        attention,
        bias=None if state.size is None else state.size.log(),  # Appendix E: log s for a token of s patches
        rope=_token_rope(rope, state.anchor),
        alpha=reduction.alpha,
        needs=pool.needs if active and keep else NOTHING,
    )
    x, significance, keys = attention_half(block, x, attend)

    if active:
        seen = Seen(
            significance=None if significance is None else significance[:, prefix:],  # (B, n)
            keys=None if keys is None else keys[:, prefix:],  # (B, n, D)
            size=state.size,
            cells=state.cells,
            assign=state.track or (carry and pool.joins),
        )
        pooled = pool(x[:, prefix:], keep, seen) if keep else keep_none(x[:, prefix:])
        x = _with_prefix(x, pooled, prefix)  # (B, prefix + K, C)
        k = x.shape[1] - prefix
        state = advance(state, pooled, k, carry=carry, joins=pool.joins, rotary=rope is not None)
    if reduction.tap.wanted():
        grouping = grouping_of(state, x[:, prefix:])
        reduction.tap(grouping.weights, grouping.grid, grouping.size, grouping.index)

    return mlp_half(block, x), state


def _token_rope(rope: Tensor | None, anchor: Tensor | None) -> Tensor | None:
    """Rotary positions ``(B, 1 or heads, K, D)`` of the tokens, from ``(N, D)`` or ``(heads, N, D)``."""
    if rope is None or anchor is None:
        return rope
    if rope.ndim == 2:
        return rope[anchor].unsqueeze(1)
    return rope[:, anchor].transpose(0, 1)


def _with_prefix(x: Tensor, pooled: Pooled, prefix: int) -> Tensor:
    """The prefix tokens of ``x (B, prefix + n, C)`` and the pooled tokens: ``(B, prefix + K, C)``."""
    if pooled.tokens is not None:
        return torch.cat((x[:, :prefix], pooled.tokens), dim=1)
    if pooled.chosen is None:
        raise ValueError("a pool must return new tokens or the indices of the chosen ones")
    first = torch.arange(prefix, device=x.device).expand(x.shape[0], prefix)
    return take(x, torch.cat((first, pooled.chosen + prefix), dim=1))


# The two residual steps of each kind of timm block.

Attend = Callable[[nn.Module, Tensor], Attended]  # one attention module on its normalised input
AttentionHalf = Callable[[Any, Tensor, Attend], Attended]
MlpHalf = Callable[[Any, Tensor], Tensor]


def _pre_norm_attention(block: Any, x: Tensor, attend: Attend) -> Attended:
    out, significance, keys = attend(block.attn, block.norm1(x))
    return x + block.drop_path1(block.ls1(out)), significance, keys


def _pre_norm_mlp(block: Any, x: Tensor) -> Tensor:
    return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))


def _post_norm_attention(block: Any, x: Tensor, attend: Attend) -> Attended:
    out, significance, keys = attend(block.attn, x)
    return x + block.drop_path1(block.norm1(out)), significance, keys


def _post_norm_mlp(block: Any, x: Tensor) -> Tensor:
    return x + block.drop_path2(block.norm2(block.mlp(x)))


def _eva_attention(block: Any, x: Tensor, attend: Attend) -> Attended:
    out, significance, keys = attend(block.attn, block.norm1(x))
    out = out if block.gamma_1 is None else block.gamma_1 * out
    return x + block.drop_path1(out), significance, keys


def _eva_mlp(block: Any, x: Tensor) -> Tensor:
    out = block.mlp(block.norm2(x))
    return x + block.drop_path2(out if block.gamma_2 is None else block.gamma_2 * out)


def _parallel_attention(block: Any, x: Tensor, attend: Attend) -> Attended:
    """The significance is summed over the attentions, the keys are concatenated."""
    outs, received, keys = zip(*(attend(part.attn, part.norm(x)) for part in block.attns), strict=True)
    steps = [part.drop_path(part.ls(out)) for part, out in zip(block.attns, outs, strict=True)]
    return (
        x + torch.stack(steps).sum(dim=0),
        None if received[0] is None else torch.stack(received).sum(dim=0),  # (B, N)
        None if keys[0] is None else torch.cat(keys, dim=2),  # (B, N, attentions · D)
    )


def _parallel_mlp(block: Any, x: Tensor) -> Tensor:
    return x + torch.stack([part(x) for part in block.ffns]).sum(dim=0)


# Found by forward: a subclass that overrides it computes something else.
HALVES: dict[Callable[..., Tensor], tuple[AttentionHalf, MlpHalf]] = {
    vit.Block.forward: (_pre_norm_attention, _pre_norm_mlp),
    vit.ResPostBlock.forward: (_post_norm_attention, _post_norm_mlp),
    vit.ParallelThingsBlock.forward: (_parallel_attention, _parallel_mlp),
    EvaBlock.forward: (_eva_attention, _eva_mlp),
    EvaBlockPostNorm.forward: (_post_norm_attention, _post_norm_mlp),
}


def attentions(block: nn.Module) -> list[Any]:
    """The attention modules of a block: one, or those of a parallel block."""
    own: Any = block
    return [part.attn for part in own.attns] if hasattr(block, "attns") else [own.attn]


# Which models can be reduced, and why others cannot.

# The methods of a model that reduction replaces; a subclass must not override them.
REPLACED = ("forward", "forward_features", "forward_intermediates", "pool")

_PARALLEL = "runs attention and MLP in parallel, so there is no point between them to pool at"
UNSUPPORTED: dict[Callable[..., object], str] = {
    vit.ParallelScalingBlock.forward: _PARALLEL,
    vit.DiffParallelScalingBlock.forward: _PARALLEL,
    DiffAttention.forward: "subtracts attention maps, so the attention a token receives can be negative",
}


def transformer(model: nn.Module) -> nn.Module:
    """The vision transformer in ``model``: itself, or the model inside timm's ``features_only`` wrapper."""
    return model.model if isinstance(model, FeatureGetterNet) else model


def check_reducible(model: nn.Module) -> None:
    """Raise a UserError with the reason if ``model`` cannot be reduced."""
    name = type(model).__name__
    base = next((kind for kind in (VisionTransformer, Eva) if isinstance(model, kind)), None)
    if base is None:
        wraps = any(isinstance(child, (VisionTransformer, Eva)) for child in model.children())
        raise UserError(
            f"cannot reduce {name}: it is not a timm VisionTransformer or Eva model"
            + ("; reduce the model inside, then wrap it again" if wraps else "")
        )
    changed = [part for part in REPLACED if getattr(type(model), part) is not getattr(base, part)]
    if changed:
        raise UserError(
            f"cannot reduce {name}: it overrides {base.__name__}.{changed[0]}, which reduction replaces"
        )
    own: Any = model
    if not isinstance(own.patch_drop, (nn.Identity, type(None))):
        raise UserError(
            f"cannot reduce {name}: with patch_drop_rate the patches of each token are unknown; "
            "create it with patch_drop_rate=0"
        )
    if not hasattr(own.patch_embed, "dynamic_feat_size"):
        kind = type(own.patch_embed).__name__
        raise UserError(f"cannot reduce {name}: its {kind} does not report the number of patches")
    for i, block in enumerate(own.blocks):
        _check_block(name, i, block)


def _check_block(name: str, index: int, block: nn.Module) -> None:
    if type(block).forward not in HALVES:
        unsupported = [block]
    else:
        unsupported = [attn for attn in attentions(block) if not is_supported(attn)]
    if unsupported:
        part = unsupported[0]
        reason = UNSUPPORTED.get(type(part).forward, "is not a supported kind")
        raise UserError(f"cannot reduce {name}: the {type(part).__name__} of block {index} {reason}")
