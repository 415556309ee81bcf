"""The attention of timm's blocks, opened up where pooling has to look inside.

As long as nobody looks inside, timm's own module runs. Otherwise the same computation is spelled out
here, for all of timm's plain self-attentions: fused or separate projections, separate biases, query and
key norms, rotary positions, grouped queries, gates and inner norms.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention, AttentionRope, DropPath, apply_rot_embed_cat
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from visualtokens.ops import attend, significance

Evidence = Literal["significance", "keys"]

# By their forward: a subclass that changes it computes something else.
KNOWN = {kind.forward for kind in (Attention, AttentionRope, EvaAttention)}

# Attention weights at a time on a CPU: a megabyte in float32, what the cache of one core holds.
CACHED_WEIGHTS = 2**18


def known(attn: nn.Module) -> bool:
    """Whether :func:`attention` can stand in for this module."""
    return type(attn).forward in KNOWN


class Attended(NamedTuple):
    """The answer of an attention, and what pooling asked to see of it. N counts all tokens here."""

    out: Tensor  # (B, N, C)
    significance: Tensor | None = None  # (B, N): how much attention each token receives
    keys: Tensor | None = None  # (B, N, D): the mean of the heads' keys


class Inputs(NamedTuple):
    """What an attention is given beside the tokens."""

    bias: Tensor | None = None  # (B, K): added to the logits of the last K tokens, whatever the query
    rope: Tensor | None = None  # rotary positions of the tokens behind the prefix
    alpha: Tensor | float | None = None  # unit queries and keys, logits times this (Appendix F)


def attention(attn: nn.Module, x: Tensor, given: Inputs, needs: frozenset[Evidence]) -> Attended:
    """softmax(q kᵀ · scale + bias) v of ``x (B, N, C)`` and, if needed, who received how much of it."""
    if not needs and given.alpha is None:
        return Attended(_timm(attn, x, given))
    module: Any = attn  # whose parts nn.Module does not declare
    q, k, v = _projections(module, x, given.rope)  # (B, heads, N, D)
    scale: Tensor | float = module.scale
    if given.alpha is not None:
        q, k, scale = F.normalize(q, dim=3), F.normalize(k, dim=3), given.alpha
    keys = k.mean(1) if "keys" in needs else None  # (B, N, D)
    if isinstance(scale, Tensor):
        q, scale = q * scale, 1.0
    received = None
    if "significance" in needs or (module.training and module.attn_drop.p > 0):
        out, received = _open(module.attn_drop, q, k, v, given.bias, scale)
    else:
        out = attend(q, k, v, _mask(given.bias, x.shape[1], q.dtype), scale=scale).transpose(1, 2)
    return Attended(_output(module, x, out), received if "significance" in needs else None, keys)


def _open(
    drop: nn.Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The answer ``(B, N, heads, D)`` and the significance ``(B, N)``.

    A few images at a time where that is possible, so that their weights never leave the cache.
    """
    b, heads, n, _ = q.shape
    step = max(1, CACHED_WEIGHTS // (heads * n**2))
    if b <= step or q.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return _look(drop, q, k, v, bias, scale)
    parts = [slice(i, i + step) for i in range(0, b, step)]
    looks = [_look(drop, q[s], k[s], v[s], None if bias is None else bias[s], scale) for s in parts]
    outs, received = zip(*looks, strict=True)
    return torch.cat(outs), torch.cat(received)


def _look(
    drop: nn.Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """:func:`_open` of all images at once."""
    weights = _weights(q, k, bias, scale)
    out = torch.bmm(run(drop, weights).flatten(0, 1), v.flatten(0, 1))  # (B · heads, N, D)
    return out.view(*q.shape[:3], v.shape[3]).transpose(1, 2), significance(weights)


def _timm(attn: nn.Module, x: Tensor, given: Inputs) -> Tensor:
    options: dict[str, Tensor | None] = {}
    if given.bias is not None:
        options["attn_mask"] = _mask(given.bias, x.shape[1], x.dtype)
    if given.rope is not None:
        options["rope"] = given.rope
    return attn(x, **options)


def _mask(bias: Tensor | None, n: int, dtype: torch.dtype) -> Tensor | None:
    """``(B, 1, 1, N)``: the same for every head and query, nothing for the prefix."""
    return None if bias is None else F.pad(bias.to(dtype), (n - bias.shape[1], 0))[:, None, None]


def _projections(attn: Any, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, ``(B, heads, N, D)`` each, with norms and rotary positions applied."""
    if attn.qkv is None:
        parts = (attn.q_proj(x), attn.k_proj(x), attn.v_proj(x))
        q, k, v = (part.unflatten(2, (-1, attn.head_dim)).transpose(1, 2) for part in parts)
    else:
        qkv = attn.qkv(x) if getattr(attn, "q_bias", None) is None else _biased(attn, x)
        q, k, v = qkv.reshape(*x.shape[:2], 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = run(attn.q_norm, q), run(attn.k_norm, k)
    if rope is not None:
        q, k = (_rotate(attn, part, rope).type_as(v) for part in (q, k))
    groups = getattr(attn, "num_kv_groups", 1)
    if groups > 1:
        k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
    return q, k, v


def _biased(attn: Any, x: Tensor) -> Tensor:
    """EVA's fused projection: learned biases for queries and values, zeros for keys."""
    bias = torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
    if attn.qkv_bias_separate:
        return attn.qkv(x) + bias
    return F.linear(x, attn.qkv.weight, bias)


def _rotate(attn: Any, x: Tensor, rope: Tensor) -> Tensor:
    prefix = attn.num_prefix_tokens
    half = getattr(attn, "rotate_half", False)
    return torch.cat((x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], rope, half=half)), dim=2)


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """softmax(q kᵀ · scale + bias), ``(B, heads, N, N)``."""
    nothing = q.new_empty(1, 1, 1)  # the product takes the scale along, if it is given something to add to
    logits = torch.baddbmm(nothing, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=scale)
    logits = logits.view(*q.shape[:2], *logits.shape[1:])
    if bias is not None:
        logits[..., logits.shape[3] - bias.shape[1] :].add_(bias.to(q.dtype)[:, None, None])
    return logits.softmax(3)


def _output(attn: Any, x: Tensor, out: Tensor) -> Tensor:
    """From the heads ``(B, N, heads, D)`` back to ``(B, N, C)``."""
    out = run(attn.norm, out.flatten(2))
    if getattr(attn, "gate", None) is not None:
        out = out * attn.gate(x).sigmoid()
    return run(attn.proj_drop, attn.proj(out))


# Modules that change nothing are not called: at one image, calling them costs more than many that do.

DROPS = (nn.Dropout, DropPath)


def run(module: nn.Module, x: Tensor) -> Tensor:
    """``module(x)``; x itself where the module is an identity, or dropout outside training."""
    kind = type(module)
    passive = kind is nn.Identity or (kind in DROPS and not module.training)
    watched = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return x if passive and not watched else module(x)
