"""What a reduced model costs, from its shapes alone.

In multiply-adds of one image, for a block of width e with n tokens before its pooling and m behind it:
attention 4·n·e² + 2·n²·e, MLP 8·m·e² (in general, n and m times the weights they meet), and what the
pooling itself multiplies. ``visualtokens.bench.count_macs`` counts the same on the running model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from timm.layers import AttentionPoolLatent, PatchEmbed
from torch import nn

from visualtokens.errors import UserError
from visualtokens.reduce.blocks import KINDS
from visualtokens.reduce.support import check, transformer


class Macs(NamedTuple):
    """Multiply-adds of one image, the parts of the blocks one by one."""

    stem: int
    attention: tuple[int, ...]
    pooling: tuple[int, ...]
    mlp: tuple[int, ...]
    head: int

    @property
    def total(self) -> int:
        return self.stem + sum(self.attention) + sum(self.pooling) + sum(self.mlp) + self.head


def macs(model: nn.Module, *, patches: int | None = None) -> Macs:
    """The cost of a vision transformer, plain or reduced, for an image of so many patches (its own size)."""
    vit: Any = transformer(model)
    check(vit)
    reduced = "reduction" in vit.__dict__
    count = vit.patch_embed.num_patches if patches is None else patches
    after = vit.reduction.schedule.tokens(count) if reduced else (count,) * len(vit.blocks)
    attention, pooling, mlp = [], [], []
    present = count
    for block, k in zip(vit.blocks, after, strict=False):  # timm may have cut blocks off behind us
        attentions = KINDS[type(block).forward].attentions(block)
        n, weights = vit.num_prefix_tokens + present, sum(map(_linear, attentions))
        width = sum(a.num_heads * a.head_dim for a in attentions)
        attention.append(n * weights + 2 * n**2 * width)
        acts = reduced and block.reduction.pool.acts(present, k)
        keys = sum(a.head_dim for a in attentions)
        pooling.append(block.reduction.pool.macs(present, k, vit.embed_dim, keys) if acts else 0)
        mlp.append((vit.num_prefix_tokens + k) * (_linear(block) - weights))
        present = k
    return Macs(_stem(vit, count), tuple(attention), tuple(pooling), tuple(mlp), _head(vit, count))


def _linear(module: nn.Module) -> int:
    """The weights of all linear layers inside: the multiply-adds of one token."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def _stem(vit: Any, patches: int) -> int:
    if not isinstance(vit.patch_embed, PatchEmbed):
        kind = type(vit.patch_embed).__name__
        raise UserError(f"the cost of a {kind} is not known; count it with visualtokens.bench.count_macs")
    # Where rotary positions are learned, they are places times frequencies in every block.
    rotary = len(vit.blocks) * patches * vit.embed_dim if getattr(vit, "rope_mixed", False) else 0
    return patches * vit.patch_embed.proj.weight.numel() + rotary


def _head(vit: Any, patches: int) -> int:
    """The classifiers, and attention pooling over all patches, which get their tokens' features back."""
    heads = [vit.head, getattr(vit, "head_dist", None)]
    total = sum(_linear(head) for head in heads if head is not None)
    pool = vit.attn_pool
    if pool is None:
        return total
    if not isinstance(pool, AttentionPoolLatent):
        raise UserError(
            f"the cost of a {type(pool).__name__} is not known; count it with visualtokens.bench.count_macs"
        )
    include = getattr(vit, "pool_include_prefix", True)
    n = patches + (vit.num_prefix_tokens if include else 0)
    once = (_linear(pool) - pool.kv.weight.numel()) * pool.latent_len
    return total + once + n * pool.kv.weight.numel() + 2 * n * pool.latent_len * vit.embed_dim
