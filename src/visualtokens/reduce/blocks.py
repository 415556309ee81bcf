"""The blocks of timm's vision transformers, taken apart between attention and MLP.

x ← x + attention(x)
x ← pool(x, K)          Token Pooling: here
x ← x + MLP(x)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
from visualtokens.reduce.attention import Attended, Inputs, attention, known, run
from visualtokens.reduce.methods import Pool, Seen
from visualtokens.reduce.state import Pooled, State, advance, emit

Attend = Callable[[nn.Module, Tensor], Tensor]  # one attention module on its input


class Halves(NamedTuple):
    """The two residual steps of a kind of block."""

    attention: Callable[[Any, Tensor, Attend], Tensor]
    mlp: Callable[[Any, Tensor], Tensor]
    attentions: Callable[[Any], list[Any]] = lambda block: [block.attn]


def _pre_norm_attention(block: Any, x: Tensor, attend: Attend) -> Tensor:
    return x + run(block.drop_path1, run(block.ls1, attend(block.attn, block.norm1(x))))


def _pre_norm_mlp(block: Any, x: Tensor) -> Tensor:
    return x + run(block.drop_path2, run(block.ls2, block.mlp(block.norm2(x))))


def _post_norm_attention(block: Any, x: Tensor, attend: Attend) -> Tensor:
    return x + run(block.drop_path1, block.norm1(attend(block.attn, x)))


def _post_norm_mlp(block: Any, x: Tensor) -> Tensor:
    return x + run(block.drop_path2, block.norm2(block.mlp(x)))


def _eva_attention(block: Any, x: Tensor, attend: Attend) -> Tensor:
    out = attend(block.attn, block.norm1(x))
    return x + run(block.drop_path1, out if block.gamma_1 is None else block.gamma_1 * out)


def _eva_mlp(block: Any, x: Tensor) -> Tensor:
    out = block.mlp(block.norm2(x))
    return x + run(block.drop_path2, out if block.gamma_2 is None else block.gamma_2 * out)


def _parallel_attention(block: Any, x: Tensor, attend: Attend) -> Tensor:
    steps = [run(part.drop_path, run(part.ls, attend(part.attn, part.norm(x)))) for part in block.attns]
    return x + torch.stack(steps).sum(dim=0)


def _parallel_mlp(block: Any, x: Tensor) -> Tensor:
    return x + torch.stack([part(x) for part in block.ffns]).sum(dim=0)


POST_NORM = Halves(_post_norm_attention, _post_norm_mlp)
# By their forward: a subclass that changes it computes something else.
KINDS: dict[Callable[..., Tensor], Halves] = {
    vit.Block.forward: Halves(_pre_norm_attention, _pre_norm_mlp),
    vit.ResPostBlock.forward: POST_NORM,
    vit.ParallelThingsBlock.forward: Halves(
        _parallel_attention, _parallel_mlp, lambda block: [part.attn for part in block.attns]
    ),
    EvaBlock.forward: Halves(_eva_attention, _eva_mlp),
    EvaBlockPostNorm.forward: POST_NORM,
}


def halves(block: nn.Module) -> Halves | None:
    """The steps of a block, None for one that is not known."""
    return KINDS.get(type(block).forward)


class BlockReduction(nn.Module):
    """What reduction adds to one block, as its child ``reduction``.

    Parameters exist only where the method learns some: ``alpha`` (Appendix F) and what the pool has.
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
    """A block on ``x (B, prefix + n, C)``, leaving at most ``keep`` of the n tokens behind the prefix."""
    own: Any = block
    reduction: BlockReduction = own.reduction
    prefix, pool = reduction.prefix, reduction.pool
    active = pool.acts(x.shape[1] - prefix, keep)
    needs = pool.needs if active else frozenset()
    given = Inputs(_log(state.size), _rope(rope, state.anchor), reduction.alpha)
    steps = KINDS[type(block).forward]
    seen: list[Attended] = []

    def attend(attn: nn.Module, tokens: Tensor) -> Tensor:
        seen.append(attention(attn, tokens, given, needs))
        return seen[-1].out

    x = steps.attention(block, x, attend)
    if active:
        x, state = _pool(reduction, x, state, keep, seen, positions=rope is not None)
    if reduction.tap.wanted():
        emit(reduction.tap, state, x[:, prefix:])
    return steps.mlp(block, x), state


def _pool(
    reduction: BlockReduction, x: Tensor, state: State, keep: int, seen: list[Attended], *, positions: bool
) -> tuple[Tensor, State]:
    prefix, pool = reduction.prefix, reduction.pool
    received = [a.significance[:, prefix:] for a in seen if a.significance is not None]
    keys = [a.keys[:, prefix:] for a in seen if a.keys is not None]
    look = Seen(
        significance=sum(received[1:], received[0]) if received else None,  # (B, n)
        keys=torch.cat(keys, dim=2) if len(keys) > 1 else next(iter(keys), None),  # (B, n, D)
        size=state.size,
        cells=state.cells,
        assign=state.track or (reduction.carry and pool.joins),
    )
    pooled = pool(x[:, prefix:], keep, look)
    x = _after(x, pooled, prefix)  # (B, prefix + K, C)
    k = x.shape[1] - prefix
    return x, advance(state, pooled, k, carry=reduction.carry, joins=pool.joins, positions=positions)


def _after(x: Tensor, pooled: Pooled, prefix: int) -> Tensor:
    if pooled.tokens is not None:
        return torch.cat((x[:, :prefix], pooled.tokens), dim=1)
    if pooled.chosen is None:
        raise ValueError("a pooling gives new tokens, or says which it chose")
    first = torch.arange(prefix, device=x.device).expand(x.shape[0], prefix)
    return take(x, torch.cat((first, pooled.chosen + prefix), dim=1))


def _log(size: Tensor | None) -> Tensor | None:
    """Appendix E: log s for a token that stands for s patches, ``(B, K)``."""
    return None if size is None else size.log()


def _rope(rope: Tensor | None, anchor: Tensor | None) -> Tensor | None:
    """The rotary positions of the tokens' patches: of ``(N, D)`` or ``(heads, N, D)``, ``(B, ·, K, D)``."""
    if rope is None or anchor is None:
        return rope
    if rope.ndim == 2:
        return rope[anchor].unsqueeze(1)
    return rope[:, anchor].transpose(0, 1)


# Which models can be reduced, and why others cannot.

# What reduction replaces: a class of its own may have changed none of it.
REPLACED = ("forward", "forward_features", "forward_intermediates", "pool")

# Kinds that are known and cannot work, with the reason.
PARALLEL = "runs attention and MLP side by side, so there is no place between them to pool"
REASONS: dict[Callable[..., object], str] = {
    vit.ParallelScalingBlock.forward: PARALLEL,
    vit.DiffParallelScalingBlock.forward: PARALLEL,
    DiffAttention.forward: "subtracts attentions, so what a token receives can be negative",
}


def transformer(model: nn.Module) -> nn.Module:
    """The vision transformer in ``model``: itself, or what timm's ``features_only`` wraps."""
    return model.model if isinstance(model, FeatureGetterNet) else model


def check(model: nn.Module) -> None:
    """Refuse what cannot be reduced faithfully."""
    name = type(model).__name__
    base = next((kind for kind in (VisionTransformer, Eva) if isinstance(model, kind)), None)
    if base is None:
        raise UserError(
            f"cannot reduce {name}: it is not one of timm's VisionTransformer or Eva models"
            + ("; reduce what it wraps, then wrap again" if _wraps(model) else "")
        )
    changed = [part for part in REPLACED if getattr(type(model), part) is not getattr(base, part)]
    if changed:
        raise UserError(
            f"cannot reduce {name}: it changes {base.__name__}.{changed[0]}, which pooling replaces"
        )
    own: Any = model
    if not isinstance(own.patch_drop, (nn.Identity, type(None))):
        raise UserError(
            f"cannot reduce {name}: with patch_drop_rate the patches that tokens stand for are unknown; "
            "create it with patch_drop_rate=0"
        )
    if not hasattr(own.patch_embed, "dynamic_feat_size"):
        kind = type(own.patch_embed).__name__
        raise UserError(f"cannot reduce {name}: its {kind} does not say how many patches an image has")
    for i, block in enumerate(own.blocks):
        _check_block(name, i, block)


def _wraps(model: nn.Module) -> bool:
    """DDP, torch.compile and the like."""
    return any(isinstance(child, (VisionTransformer, Eva)) for child in model.children())


def _check_block(name: str, index: int, block: nn.Module) -> None:
    steps = halves(block)
    parts = [block] if steps is None else [a for a in steps.attentions(block) if not known(a)]
    if not parts:
        return
    part = parts[0]
    reason = REASONS.get(type(part).forward, "is not a kind whose inside is known")
    raise UserError(f"cannot reduce {name}: the {type(part).__name__} of block {index} {reason}")
