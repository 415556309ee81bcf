"""A reduced block: attention, pool, MLP; and the two halves of every supported kind of block.

x ← x + attention(x)
x ← pool(x, K)          Token Pooling
x ← x + MLP(x)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.grouping import Tap
from visualtokens.ops import take
from visualtokens.reduce.attention import NOWHERE, Attended, Positions, attention, is_supported, kind
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
    block: nn.Module, x: Tensor, state: State, keep: int, positions: Positions = NOWHERE
) -> tuple[Tensor, State]:
    """The block's output ``(B, prefix + K, C)`` for ``x (B, prefix + n, C)``, and the new state.

    ``keep`` is the largest K allowed; ``positions`` are those of all patches.
    """
    own: Any = block
    reduction: BlockReduction = own.reduction
    prefix, pool, carry = reduction.prefix, reduction.pool, reduction.carry
    halves = HALVES[kind(block)]

    active = pool.acts(x.shape[1] - prefix, keep)
    none_left = active and keep == 0
    attend = partial(
        attention,
        bias=None if state.size is None else state.size.log(),  # Appendix E: log s for a token of s patches
        positions=_of_tokens(positions, state.anchor, prefix),
        alpha=reduction.alpha,
        needs=pool.needs if active and keep else NOTHING,
        queries=prefix if none_left else None,  # the others would be dropped
    )
    before = x
    x, significance, keys = halves.attention(block, x, attend)  # (B, prefix + n, C)

    if active:
        seen = Seen(
            significance=None if significance is None else significance[:, prefix:],  # (B, n)
            keys=None if keys is None else keys[:, prefix:],  # (B, n, D)
            size=state.size,
            cells=state.cells,
            assign=state.track or (carry and pool.joins),
        )
        pooled = keep_none(before[:, prefix:]) if none_left else pool(x[:, prefix:], keep, seen)
        x = _with_prefix(x, pooled, prefix)  # (B, prefix + K, C)
        k = x.shape[1] - prefix
        state = advance(state, pooled, k, carry=carry, joins=pool.joins, anchored=bool(positions))
    if reduction.tap.wanted():
        grouping = grouping_of(state, x[:, prefix:])
        reduction.tap(grouping.weights, grouping.grid, grouping.size, grouping.index)

    return halves.mlp(block, x), state


def _of_tokens(positions: Positions, anchor: Tensor | None, prefix: int) -> Positions:
    """The positions of the tokens: those of their anchors ``(B, K)``, patches that stand for them."""
    if anchor is None:
        return positions
    rope, relative, decomposed = positions
    if rope is not None and rope.ndim == 2:
        rope = rope[anchor].unsqueeze(1)  # (B, 1, K, D) from (N, D)
    elif rope is not None:
        rope = rope[:, anchor].transpose(0, 1)  # (B, heads, K, D) from (heads, N, D)
    if relative is not None:
        first = torch.arange(prefix, device=anchor.device).expand(anchor.shape[0], prefix)
        index = torch.cat((first, anchor + prefix), dim=1)  # (B, prefix + K)
        rows, columns = index.unsqueeze(2), index.unsqueeze(1)
        relative = relative[0][:, rows, columns].transpose(0, 1)  # (B, heads, prefix + K, prefix + K)
    if decomposed is not None:
        decomposed = decomposed._replace(place=decomposed.place[anchor])  # (B, K, 2)
    return Positions(rope, relative, decomposed)


def _with_prefix(x: Tensor, pooled: Pooled, prefix: int) -> Tensor:
    """The prefix tokens of ``x (B, prefix + n, C)`` and the pooled tokens: ``(B, prefix + K, C)``."""
    if pooled.tokens is not None:
        return torch.cat((x[:, :prefix], pooled.tokens), dim=1)
    if pooled.chosen is None:
        raise ValueError("a pool must return new tokens or the indices of the chosen ones")
    first = torch.arange(prefix, device=x.device).expand(x.shape[0], prefix)
    return take(x, torch.cat((first, pooled.chosen + prefix), dim=1))


# The two residual steps of each kind of block.

# One attention module on its normalised input; it may return the first tokens only.
Attend = Callable[[nn.Module, Tensor], Attended]


class Halves(NamedTuple):
    """The two residual steps of a kind of block."""

    attention: Callable[[Any, Tensor, Attend], Attended]
    mlp: Callable[[Any, Tensor], Tensor]
    attentions: Callable[[Any], list[nn.Module]]  # the attention modules of a block


def _pre_norm(norm1: str, attn: str, after1: str, norm2: str, after2: str, *, mlp: str = "mlp") -> Halves:
    """x + after(f(norm(x))), f being attention and MLP; the names of the parts of the block.

    ``after1`` and ``after2`` list the modules between f and the sum: dropout, layer scale, stochastic depth.
    """

    def attention_half(block: Any, x: Tensor, attend: Attend) -> Attended:
        out, significance, keys = attend(getattr(block, attn), getattr(block, norm1)(x))
        return x[:, : out.shape[1]] + _chain(block, after1, out), significance, keys

    def mlp_half(block: Any, x: Tensor) -> Tensor:
        return x + _chain(block, after2, getattr(block, mlp)(getattr(block, norm2)(x)))

    return Halves(attention_half, mlp_half, lambda block: [getattr(block, attn)])


def _chain(block: Any, names: str, x: Tensor) -> Tensor:
    for name in names.split():
        x = getattr(block, name)(x)
    return x


def _post_norm_attention(block: Any, x: Tensor, attend: Attend) -> Attended:
    out, significance, keys = attend(block.attn, x)
    return x[:, : out.shape[1]] + block.drop_path1(block.norm1(out)), significance, keys


def _post_norm_mlp(block: Any, x: Tensor) -> Tensor:
    return x + block.drop_path2(block.norm2(block.mlp(x)))


def _gamma_attention(block: Any, x: Tensor, attend: Attend) -> Attended:
    out, significance, keys = attend(block.attn, block.norm1(x))
    out = out if block.gamma_1 is None else block.gamma_1 * out
    return x[:, : out.shape[1]] + block.drop_path1(out), significance, keys


def _gamma_mlp(block: Any, x: Tensor) -> Tensor:
    out = block.mlp(block.norm2(x))
    return x + block.drop_path2(out if block.gamma_2 is None else block.gamma_2 * out)


def _parallel_attention(block: Any, x: Tensor, attend: Attend) -> Attended:
    """The significance is summed over the attentions, the keys are concatenated."""
    outs, received, keys = zip(*(attend(part.attn, part.norm(x)) for part in block.attns), strict=True)
    steps = [part.drop_path(part.ls(out)) for part, out in zip(block.attns, outs, strict=True)]
    return (
        x[:, : steps[0].shape[1]] + torch.stack(steps).sum(dim=0),
        None if received[0] is None else torch.stack(received).sum(dim=0),  # (B, N)
        None if keys[0] is None else torch.cat(keys, dim=2),  # (B, N, attentions · D)
    )


def _parallel_mlp(block: Any, x: Tensor) -> Tensor:
    return x + torch.stack([part(x) for part in block.ffns]).sum(dim=0)


_TIMM = _pre_norm("norm1", "attn", "ls1 drop_path1", "norm2", "ls2 drop_path2")
_POST_NORM = Halves(_post_norm_attention, _post_norm_mlp, lambda block: [block.attn])
_GAMMA = Halves(_gamma_attention, _gamma_mlp, lambda block: [block.attn])
_PARALLEL = Halves(_parallel_attention, _parallel_mlp, lambda block: [part.attn for part in block.attns])
_HF_VIT = _pre_norm("layernorm_before", "attention", "dropout", "layernorm_after", "dropout")
_HF_CLIP = _pre_norm("layer_norm1", "self_attn", "", "layer_norm2", "")
_HF_DINO = _pre_norm("norm1", "attention", "layer_scale1 drop_path", "norm2", "layer_scale2 drop_path")

_MODELS = "transformers.models"
HALVES: dict[str, Halves] = {
    "timm.models.vision_transformer.Block": _TIMM,
    "timm.models.vision_transformer.ResPostBlock": _POST_NORM,
    "timm.models.vision_transformer.ParallelThingsBlock": _PARALLEL,
    "timm.models.eva.EvaBlock": _GAMMA,
    "timm.models.eva.EvaBlockPostNorm": _POST_NORM,
    "timm.models.beit.Block": _GAMMA,
    "timm.models.vision_transformer_relpos.RelPosBlock": _TIMM,
    "timm.models.vision_transformer_relpos.ResPostRelPosBlock": _POST_NORM,
    "timm.models.vision_transformer_sam.Block": _TIMM,
    f"{_MODELS}.vit.modeling_vit.ViTLayer": _HF_VIT,
    f"{_MODELS}.deit.modeling_deit.DeiTLayer": _HF_VIT,
    f"{_MODELS}.clip.modeling_clip.CLIPEncoderLayer": _HF_CLIP,
    f"{_MODELS}.siglip.modeling_siglip.SiglipEncoderLayer": _HF_CLIP,
    f"{_MODELS}.dinov2.modeling_dinov2.Dinov2Layer": _HF_DINO,
    f"{_MODELS}.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersLayer": _HF_DINO,
    f"{_MODELS}.dinov3_vit.modeling_dinov3_vit.DINOv3ViTLayer": _HF_DINO,
    "torchvision.models.vision_transformer.EncoderBlock": _pre_norm(
        "ln_1", "self_attention", "dropout", "ln_2", ""
    ),
    "open_clip.transformer.ResidualAttentionBlock": _pre_norm("ln_1", "attn", "ls_1", "ln_2", "ls_2"),
}


def attentions(block: nn.Module) -> list[nn.Module]:
    """The attention modules of a block: one, or those of a parallel block."""
    return HALVES[kind(block)].attentions(block)


_NO_POINT = "runs attention and MLP in parallel, so there is no point between them to pool at"
UNSUPPORTED = {
    "timm.models.vision_transformer.ParallelScalingBlock": _NO_POINT,
    "timm.models.vision_transformer.DiffParallelScalingBlock": _NO_POINT,
    "timm.layers.diff_attention.DiffAttention": "subtracts attention maps, so the attention a token receives "
    "can be negative",
}


def check_block(model: str, index: int, block: nn.Module) -> None:
    """Raise a UserError with the reason if a block of a ``model`` (its class) cannot be reduced."""
    unsupported = [block]
    if kind(block) in HALVES:
        unsupported = [attn for attn in attentions(block) if not is_supported(attn)]
    if unsupported:
        part = unsupported[0]
        reason = UNSUPPORTED.get(kind(part), "is not a supported kind")
        raise UserError(f"cannot reduce {model}: the {type(part).__name__} of block {index} {reason}")
