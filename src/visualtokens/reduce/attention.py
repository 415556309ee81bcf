"""The self-attention of timm's blocks, and what a pool needs from it: significance and keys.

:func:`attention` covers every plain self-attention module in timm: fused or separate projections, separate
biases, query and key norms, rotary positions, grouped queries, gates and inner norms.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from visualtokens.ops import attend, significance

Evidence = Literal["significance", "keys"]
# Output (B, N, C); significance (B, N) and keys (B, N, D) if they were needed. N counts the prefix tokens.
Attended = tuple[Tensor, Tensor | None, Tensor | None]

# Compared by forward: a subclass that overrides it computes something else.
SUPPORTED = {kind.forward for kind in (Attention, AttentionRope, EvaAttention)}


def is_supported(attn: nn.Module) -> bool:
    """Whether :func:`attention` computes the same as this module."""
    return type(attn).forward in SUPPORTED


def attention(
    attn: nn.Module,
    x: Tensor,
    *,
    bias: Tensor | None = None,
    rope: Tensor | None = None,
    alpha: Tensor | float | None = None,
    needs: frozenset[Evidence] = frozenset(),
) -> Attended:
    """softmax(q kᵀ · scale + bias) v for ``x (B, N, C)``, with the significance and the keys if needed.

    ``bias (B, K)`` is added to the logits of the last K tokens. ``rope`` holds the rotary positions of the
    tokens after the prefix. With ``alpha``, queries and keys have unit length and ``alpha`` is the scale
    (Appendix F).

    Three forms of the same equation: timm's own module if nothing is needed from inside, fused attention if
    only the keys are, and explicit weights otherwise.
    """
    if not needs and alpha is None:
        return _timm_attention(attn, x, bias, rope), None, None
    module: Any = attn  # nn.Module does not declare its parts
    q, k, v = _projections(module, x, rope)  # (B, heads, N, D)
    scale: Tensor | float = module.scale
    if alpha is not None:
        q, k, scale = F.normalize(q, dim=3), F.normalize(k, dim=3), alpha
    keys = k.mean(1) if "keys" in needs else None  # (B, N, D)
    if isinstance(scale, Tensor):
        q, scale = q * scale, 1.0
    received = None
    if "significance" in needs:
        out, received = attend_with_weights(q, k, v, bias, scale, module.attn_drop)
    elif module.training and module.attn_drop.p > 0:
        out, _ = attend_with_weights(q, k, v, bias, scale, module.attn_drop)
    else:
        out = attend(q, k, v, _mask(bias, x.shape[1], q.dtype), scale=scale)  # (B, heads, N, D)
    return _output(module, x, out), received, keys


def attend_with_weights(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: nn.Module
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale + bias) v, ``(B, heads, N, D)``, and the significance ``(B, N)``.

    ``q``, ``k``, ``v (B, heads, N, D)``; ``bias (B, K)`` is for the last K tokens.
    """
    # baddbmm applies the scale within the product; with beta=0 its first argument is ignored
    logits = torch.baddbmm(q.new_empty(1, 1, 1), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=scale)
    logits = logits.view(*q.shape[:3], k.shape[2])  # (B, heads, N, N)
    if bias is not None:
        logits[..., logits.shape[3] - bias.shape[1] :].add_(bias.to(q.dtype)[:, None, None])
    weights = logits.softmax(3)
    out = torch.bmm(dropout(weights).flatten(0, 1), v.flatten(0, 1))  # (B · heads, N, D)
    return out.view(*q.shape[:3], v.shape[3]), significance(weights)


def _timm_attention(attn: nn.Module, x: Tensor, bias: Tensor | None, rope: Tensor | None) -> Tensor:
    options: dict[str, Tensor | None] = {}
    if bias is not None:
        options["attn_mask"] = _mask(bias, x.shape[1], x.dtype)
    if rope is not None:
        options["rope"] = rope
    return attn(x, **options)


def _mask(bias: Tensor | None, n: int, dtype: torch.dtype) -> Tensor | None:
    """``bias (B, K)`` as a mask ``(B, 1, 1, N)``, zero for the prefix tokens."""
    return None if bias is None else F.pad(bias.to(dtype), (n - bias.shape[1], 0))[:, None, None]


def _projections(attn: Any, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``(B, heads, N, D)``, with norms and rotary positions applied."""
    if attn.qkv is None:
        parts = (attn.q_proj(x), attn.k_proj(x), attn.v_proj(x))
        q, k, v = (part.unflatten(2, (-1, attn.head_dim)).transpose(1, 2) for part in parts)
    else:
        qkv = attn.qkv(x) if getattr(attn, "q_bias", None) is None else _eva_qkv(attn, x)
        q, k, v = qkv.reshape(*x.shape[:2], 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = attn.q_norm(q), attn.k_norm(k)
    if rope is not None:
        q, k = (_rotate(attn, part, rope).type_as(v) for part in (q, k))
    groups = getattr(attn, "num_kv_groups", 1)
    if groups > 1:
        k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
    return q, k, v


def _eva_qkv(attn: Any, x: Tensor) -> Tensor:
    """EVA's fused projection: learned biases for queries and values, zeros for keys."""
    bias = torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
    if attn.qkv_bias_separate:
        return attn.qkv(x) + bias
    return F.linear(x, attn.qkv.weight, bias)


def _rotate(attn: Any, x: Tensor, rope: Tensor) -> Tensor:
    """Apply rotary positions to the tokens after the prefix of ``x (B, heads, N, D)``."""
    prefix = attn.num_prefix_tokens
    half = getattr(attn, "rotate_half", False)
    return torch.cat((x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], rope, half=half)), dim=2)


def _output(attn: Any, x: Tensor, out: Tensor) -> Tensor:
    """Join the heads of ``out (B, heads, N, D)`` and project to ``(B, N, C)``."""
    out = attn.norm(out.transpose(1, 2).flatten(2))
    if getattr(attn, "gate", None) is not None:
        out = out * attn.gate(x).sigmoid()
    return attn.proj_drop(attn.proj(out))
