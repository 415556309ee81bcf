"""How many tokens every block keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

from timm.layers import AttentionPoolLatent, PatchEmbed
from torch import nn

from visualtokens.errors import UserError, unknown
from visualtokens.reduce.blocks import KINDS, check, transformer

Keep = str | float | Sequence[int] | Sequence[float]

# Token Pooling Tables 3 to 5, sparsity levels 0 to 7, with the two misprints corrected: deit_small/6 is
# printed with a 0 too many at the end, deit_e252/0 with a 177 too few. For 196 patches and 12 blocks.
PUBLISHED: dict[str, tuple[tuple[int, ...], ...]] = {
    "deit_small": (
        (196, 196, 195, 194, 189, 180, 173, 173, 173, 173, 173, 173),
        (196, 195, 193, 188, 169, 140, 121, 110, 73, 38, 7, 0),
        (196, 195, 190, 177, 141, 108, 84, 69, 35, 18, 3, 0),
        (196, 194, 187, 163, 118, 85, 58, 47, 20, 12, 2, 0),
        (196, 193, 179, 142, 97, 64, 46, 34, 13, 9, 1, 0),
        (194, 183, 142, 89, 41, 20, 10, 7, 0, 0, 0, 0),
        (186, 162, 102, 56, 13, 4, 2, 2, 0, 0, 0, 0),
        (162, 129, 66, 33, 4, 1, 1, 0, 0, 0, 0, 0),
    ),
    "deit_e318": (
        (196, 196, 196, 194, 192, 184, 181, 181, 170, 170, 170, 170),
        (196, 195, 195, 190, 171, 147, 132, 122, 66, 43, 15, 0),
        (196, 195, 193, 180, 143, 109, 92, 77, 40, 21, 4, 0),
        (196, 195, 190, 165, 119, 84, 65, 50, 26, 14, 3, 0),
        (196, 194, 184, 149, 97, 65, 47, 33, 12, 9, 2, 0),
        (196, 186, 153, 93, 40, 15, 12, 9, 0, 0, 0, 0),
        (193, 173, 109, 52, 16, 4, 4, 4, 0, 0, 0, 0),
        (183, 145, 80, 33, 5, 1, 1, 2, 0, 0, 0, 0),
    ),
    "deit_e252": (
        (196, 196, 196, 195, 193, 189, 177, 177, 177, 177, 177, 177),
        (196, 196, 195, 189, 176, 161, 123, 122, 76, 48, 17, 0),
        (196, 196, 193, 179, 154, 123, 88, 79, 39, 22, 5, 0),
        (196, 195, 188, 167, 131, 96, 63, 52, 13, 11, 2, 0),
        (196, 194, 181, 147, 111, 75, 48, 36, 5, 7, 2, 0),
        (196, 187, 129, 88, 54, 20, 10, 10, 0, 1, 0, 0),
        (194, 163, 83, 44, 22, 6, 1, 3, 0, 0, 0, 0),
        (188, 122, 58, 28, 12, 2, 0, 2, 0, 0, 0, 0),
    ),
}
PATCHES = 196  # of the published models


@dataclass(frozen=True)
class Schedule:
    """What each block keeps of its tokens, prefix tokens (class, registers) not counted: one entry per block.

    | entry | the block keeps |
    |---|---|
    | int, 0 or more | that many tokens |
    | negative int | so many fewer than it gets, but at least half of them |
    | float, 0 to 1 | this share of the image's patches, rounded up |

    No block can keep more than it gets: entries that rise mean no change.
    """

    entries: tuple[int | float, ...]

    @classmethod
    def of(cls, keep: Keep, blocks: int) -> Schedule:
        """The schedule of a model of so many blocks.

        | keep | means |
        |---|---|
        | sequence | one entry per block, as above |
        | float, 0 to 1 | the share of the patches left after the last block; all blocks take the same share |
        | negative int | every block gives up so many tokens, at most half of them (token merging's r) |
        | ``"deit_small/3"`` | a schedule of Token Pooling's Tables 3 to 5, as shares of its 196 patches |
        """
        if isinstance(keep, str):
            entries: tuple[int | float, ...] = _published(keep)
        elif isinstance(keep, Sequence):
            entries = tuple(_entry(value, f"keep[{i}]") for i, value in enumerate(keep))
        else:
            entries = _uniform(_entry(keep, "keep"), blocks)
        if len(entries) != blocks:
            raise UserError(f"keep has {len(entries)} entries, the model {blocks} blocks; give one per block")
        return cls(entries)

    def tokens(self, patches: int) -> tuple[int, ...]:
        """How many tokens are left after each block, for an image of so many patches."""
        present, after = patches, []
        for entry in self.entries:
            present = min(present, _wanted(entry, present, patches))
            after.append(present)
        return tuple(after)


def _wanted(entry: int | float, present: int, patches: int) -> int:
    if isinstance(entry, float):
        return math.ceil(entry * patches - 1e-9)  # 196 · (195/196) must not become 196 by rounding
    return entry if entry >= 0 else max(present + entry, (present + 1) // 2)


def _uniform(value: int | float, blocks: int) -> tuple[int | float, ...]:
    if isinstance(value, float):
        return tuple(value ** ((i + 1) / blocks) for i in range(blocks))
    if value >= 0:
        raise UserError(
            f"keep={value} says one number for {blocks} blocks; give keep=-{value} to take {value} away in "
            f"every block, keep=[{value}] * {blocks} to leave {value} after each, or a share such as 0.5"
        )
    return (value,) * blocks


def _entry(value: object, name: str) -> int | float:
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) <= 1:
        return float(value)
    raise UserError(f"{name} is {value!r}; give a whole number of tokens, or a share from 0 to 1")


def _published(name: str) -> tuple[float, ...]:
    model, _, level = name.partition("/")
    if model not in PUBLISHED:
        raise unknown("published schedule", name, published_schedules())
    if not level.isdecimal() or int(level) >= len(PUBLISHED[model]):
        last = len(PUBLISHED[model]) - 1
        raise UserError(f"keep={name!r} has no such sparsity level; give {model}/0 to {model}/{last}")
    return tuple(count / PATCHES for count in PUBLISHED[model][int(level)])


def published_schedules() -> list[str]:
    """The names that ``keep`` understands."""
    return [f"{model}/{level}" for model, levels in PUBLISHED.items() for level in range(len(levels))]


# What a reduced model costs, from its shapes alone.
#
# In multiply-adds of one image, for a block of width e with n tokens before its pooling and m behind it:
# attention 4·n·e² + 2·n²·e, MLP 8·m·e² (in general, n and m times the weights they meet), and what the
# pooling itself multiplies. ``visualtokens.bench.count_macs`` counts the same on the running model.


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
