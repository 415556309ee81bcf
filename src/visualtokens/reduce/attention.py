"""The self-attention of a block, and what a pool needs from it: significance and keys.

:func:`attention` covers the plain self-attention modules of timm, torch, transformers and open_clip: fused or
separate projections, separate biases, query and key norms, rotary and relative positions, grouped queries,
gates and inner norms.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn

from visualtokens.ops import attend, join_heads, significance, split_heads

Evidence = Literal["significance", "keys"]
# Output (B, N, C); significance (B, N) and keys (B, N, D) if they were needed. N counts the prefix tokens.
Attended = tuple[Tensor, Tensor | None, Tensor | None]


class Decomposed(NamedTuple):
    """Relative positions that depend on the query: q · rows[Δrow] + q · columns[Δcolumn] (SAM, MViTv2)."""

    rows: Tensor  # (2 · H - 1, D)
    columns: Tensor  # (2 · W - 1, D)
    place: Tensor  # row and column of each token, (N, 2) or (B, N, 2)


class Positions(NamedTuple):
    """What attention knows about the places of its tokens beyond the position embeddings."""

    rope: Tensor | None = None  # rotary positions of the tokens after the prefix, (…, N, D)
    relative: Tensor | None = None  # added to the logits, (1 or B, heads, N, N), prefix included
    decomposed: Decomposed | None = None

    def __bool__(self) -> bool:
        return any(part is not None for part in self)


NOWHERE = Positions()


def attention(
    attn: nn.Module,
    x: Tensor,
    *,
    bias: Tensor | None = None,
    positions: Positions = NOWHERE,
    alpha: Tensor | float | None = None,
    needs: frozenset[Evidence] = frozenset(),
    queries: int | None = None,
) -> Attended:
    """softmax(q kᵀ · scale + bias) v for ``x (B, N, C)``, with the significance and the keys if needed.

    ``bias (B, K)`` is added to the logits of the last K tokens. With ``alpha``, queries and keys have unit
    length and ``alpha`` is the scale (Appendix F). With ``queries``, only the outputs of that many first
    tokens, which are prefix tokens, are computed.

    Three forms of the same equation: timm's own module if nothing is needed from inside, fused attention if
    only the keys are, and explicit weights otherwise.
    """
    parts = parts_of(attn)
    if not needs and alpha is None and queries is None and parts.takes_mask:
        return _timm_attention(attn, x, bias, positions.rope), None, None
    asking = x if queries is None else x[:, :queries]
    q, k, v = parts.project(attn, asking, x, positions.rope)  # (B, heads, N, D)
    relative = positions.relative if positions.decomposed is None else _relative(q, positions.decomposed)
    if relative is not None and queries is not None:
        relative = relative[:, :, :queries]
    scale: Tensor | float = parts.scale(attn)
    if alpha is not None:
        q, k, scale = F.normalize(q, dim=3), F.normalize(k, dim=3), alpha
    keys = k.mean(1) if "keys" in needs else None  # (B, N, D)
    if isinstance(scale, Tensor):
        q, scale = q * scale, 1.0
    dropout = parts.dropout(attn) if attn.training else 0.0
    received = None
    if "significance" in needs or dropout:
        out, received = attend_with_weights(q, k, v, bias, scale, relative=relative, dropout=dropout)
    else:
        mask = None if bias is None else _mask(bias, x.shape[1], q.dtype)
        if relative is not None:
            mask = relative if mask is None else relative + mask
        out = attend(q, k, v, mask, scale=scale)  # (B, heads, N, D)
    return parts.output(attn, asking, out), received if "significance" in needs else None, keys


def attend_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    *,
    relative: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale + bias) v, ``(B, heads, N, D)``, and the significance ``(B, N)``.

    ``q``, ``k``, ``v (B, heads, N, D)``; ``bias (B, K)`` is for the last K tokens; ``relative`` is that of
    :class:`Positions`; ``dropout`` is the probability for the weights.
    """
    # baddbmm applies the scale within the product; with beta=0 its first argument is ignored
    logits = torch.baddbmm(q.new_empty(1, 1, 1), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=scale)
    logits = logits.view(*q.shape[:3], k.shape[2])  # (B, heads, N, N)
    if bias is not None:
        logits.add_(_mask(bias, logits.shape[3], q.dtype))
    if relative is not None:
        logits.add_(relative)
    weights = logits.softmax(3)
    mixing = F.dropout(weights, dropout) if dropout else weights
    out = torch.bmm(mixing.flatten(0, 1), v.flatten(0, 1))  # (B · heads, N, D)
    return out.view(*q.shape[:3], v.shape[3]), significance(weights)


def _timm_attention(attn: nn.Module, x: Tensor, bias: Tensor | None, rope: Tensor | None) -> Tensor:
    options: dict[str, Tensor | None] = {}
    if bias is not None:
        options["attn_mask"] = _mask(bias, x.shape[1], x.dtype)
    if rope is not None:
        options["rope"] = rope
    return attn(x, **options)


def _mask(bias: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """``bias (B, K)`` as a mask ``(B, 1, 1, N)``, zero for the prefix tokens."""
    return F.pad(bias.to(dtype), (n - bias.shape[1], 0))[:, None, None]


def _relative(q: Tensor, positions: Decomposed) -> Tensor:
    """The bias ``(B, heads, N, N)`` of decomposed positions for queries ``(B, heads, N, D)``."""
    total = torch.zeros((), dtype=q.dtype, device=q.device)
    for table, place in zip(positions[:2], positions.place.long().unbind(-1), strict=True):
        place = place if place.ndim == 2 else place.unsqueeze(0)  # (1 or B, N)
        offset = place.unsqueeze(2) - place.unsqueeze(1) + (len(table) - 1) // 2  # (1 or B, N, N)
        products = q @ table.mT  # (B, heads, N, 2 · H - 1)
        total = total + products.gather(3, offset.unsqueeze(1).expand(*q.shape[:3], -1))
    return total


class Parts(NamedTuple):
    """How a kind of attention module computes the parts of the equation."""

    project: Any  # (module, x of the queries, x, rope) -> queries, keys and values (B, heads, N, D)
    output: Any  # (module, x, out (B, heads, N, D)) -> (B, N, C)
    scale: Any  # (module) -> scale of the logits
    dropout: Any  # (module) -> dropout probability of the weights
    shape: Any  # (module) -> heads, D
    takes_mask: bool = False  # whether the module itself can be called with a mask, as those of timm can


def kind(module: nn.Module) -> str:
    """The name of the class whose ``forward`` a module runs: a subclass that overrides it is another kind."""
    forward = type(module).forward
    return f"{forward.__module__}.{forward.__qualname__.removesuffix('.forward')}"


def parts_of(attn: nn.Module) -> Parts:
    """The parts of a supported attention module."""
    return PARTS[kind(attn)]


def is_supported(attn: nn.Module) -> bool:
    """Whether :func:`attention` computes the same as this module."""
    return kind(attn) in PARTS


# timm: one fused projection, or three.


def _timm_projections(
    attn: Any, asking: Tensor, x: Tensor, rope: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, with norms and rotary positions applied."""
    if attn.qkv is None:
        parts = (attn.q_proj(asking), attn.k_proj(x), attn.v_proj(x))
        q, k, v = (part.unflatten(2, (-1, attn.head_dim)).transpose(1, 2) for part in parts)
    else:
        q, k, v = _from_fused(attn, asking, x)
    if hasattr(attn, "q_norm"):
        q, k = attn.q_norm(q), attn.k_norm(k)
    if rope is not None:
        q = _rotate(attn, q, rope).type_as(v) if asking is x else q  # prefix tokens have no position
        k = _rotate(attn, k, rope).type_as(v)
    groups = getattr(attn, "num_kv_groups", 1)
    if groups > 1:
        k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
    return q, k, v


def _from_fused(attn: Any, asking: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values of one projection.

    EVA and BEiT have learned biases for queries and values, and zeros for keys.
    """
    weight, bias = attn.qkv.weight, attn.qkv.bias
    if getattr(attn, "q_bias", None) is not None:
        bias = torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
    if asking is x:
        qkv = attn.qkv(x) if bias is attn.qkv.bias else F.linear(x, weight, bias)
        return qkv.unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    width = len(weight) // 3
    own, others = (None, None) if bias is None else bias.split((width, 2 * width))
    q = F.linear(asking, weight[:width], own)
    k, v = F.linear(x, weight[width:], others).chunk(2, dim=2)
    return tuple(split_heads(part, attn.num_heads) for part in (q, k, v))


def _rotate(attn: Any, x: Tensor, rope: Tensor) -> Tensor:
    """Apply rotary positions to the tokens after the prefix of ``x (B, heads, N, D)``."""
    prefix = attn.num_prefix_tokens
    half = getattr(attn, "rotate_half", False)
    return torch.cat((x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], rope, half=half)), dim=2)


def _timm_output(attn: Any, x: Tensor, out: Tensor) -> Tensor:
    out = join_heads(out)
    if hasattr(attn, "norm"):
        out = attn.norm(out)
    if getattr(attn, "gate", None) is not None:
        out = out * attn.gate(x).sigmoid()
    return attn.proj_drop(attn.proj(out))


def _timm_shape(attn: Any) -> tuple[int, int]:
    return attn.num_heads, attn.proj.in_features // attn.num_heads


_TIMM = Parts(
    project=_timm_projections,
    output=_timm_output,
    scale=lambda attn: attn.scale,
    dropout=lambda attn: attn.attn_drop.p,
    shape=_timm_shape,
)


# transformers: three projections.


def _hf_projections(
    attn: Any, asking: Tensor, x: Tensor, rope: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    parts = (attn.q_proj(asking), attn.k_proj(x), attn.v_proj(x))
    q, k, v = (part.unflatten(2, (-1, attn.head_dim)).transpose(1, 2) for part in parts)
    if rope is None:
        return q, k, v
    return _rotate_half(q, rope) if asking is x else q, _rotate_half(k, rope), v


def _rotate_half(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate the last tokens of ``x (B, heads, N, D)`` by ``rope (…, n, 2 · D)``: cosines, then sines."""
    cos, sin = rope.chunk(2, dim=-1)
    prefix = x.shape[2] - rope.shape[-2]
    first, second = x[:, :, prefix:].chunk(2, dim=3)
    rotated = x[:, :, prefix:] * cos + torch.cat((-second, first), dim=3) * sin
    return torch.cat((x[:, :, :prefix], rotated), dim=2)


def _hf(out: str, scale: str, dropout: str) -> Parts:
    """The parts of a module with these names for its output projection, scale and dropout."""
    return Parts(
        project=_hf_projections,
        output=lambda attn, x, heads: getattr(attn, out)(join_heads(heads)),
        scale=lambda attn: getattr(attn, scale),
        dropout=lambda attn: getattr(attn, dropout),
        shape=lambda attn: (attn.q_proj.out_features // attn.head_dim, attn.head_dim),
    )


# torch.nn.MultiheadAttention, in torchvision and open_clip.


def _torch_projections(attn: Any, asking: Tensor, x: Tensor, rope: Tensor | None) -> tuple[Tensor, ...]:
    weights = attn.in_proj_weight.chunk(3)
    biases = (None, None, None) if attn.in_proj_bias is None else attn.in_proj_bias.chunk(3)
    inputs = (asking, x, x)
    parts = (F.linear(*each) for each in zip(inputs, weights, biases, strict=True))
    return tuple(split_heads(part, attn.num_heads) for part in parts)


_TORCH = Parts(
    project=_torch_projections,
    output=lambda attn, x, out: attn.out_proj(join_heads(out)),
    scale=lambda attn: attn.head_dim**-0.5,
    dropout=lambda attn: attn.dropout,
    shape=lambda attn: (attn.num_heads, attn.head_dim),
)

_MODELS = "transformers.models"
PARTS: dict[str, Parts] = {
    "timm.layers.attention.Attention": _TIMM._replace(takes_mask=True),
    "timm.layers.attention.AttentionRope": _TIMM._replace(takes_mask=True),
    "timm.models.eva.EvaAttention": _TIMM._replace(takes_mask=True),
    "timm.models.beit.Attention": _TIMM,
    "timm.models.vision_transformer_relpos.RelPosAttention": _TIMM,
    "timm.models.vision_transformer_sam.Attention": _TIMM,
    "torch.nn.modules.activation.MultiheadAttention": _TORCH,
    f"{_MODELS}.vit.modeling_vit.ViTAttention": _hf("o_proj", "scaling", "attention_dropout"),
    f"{_MODELS}.deit.modeling_deit.DeiTAttention": _hf("o_proj", "scaling", "attention_dropout"),
    f"{_MODELS}.clip.modeling_clip.CLIPAttention": _hf("out_proj", "scale", "dropout"),
    f"{_MODELS}.siglip.modeling_siglip.SiglipAttention": _hf("out_proj", "scale", "dropout"),
    f"{_MODELS}.dinov2.modeling_dinov2.Dinov2Attention": _hf("o_proj", "scaling", "attention_dropout"),
    f"{_MODELS}.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersAttention": _hf(
        "o_proj", "scaling", "attention_dropout"
    ),
    f"{_MODELS}.dinov3_vit.modeling_dinov3_vit.DINOv3ViTAttention": _hf("o_proj", "scaling", "dropout"),
}
