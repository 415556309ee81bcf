"""How many tokens each block keeps, the published schedules, and the cost of a reduced model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from visualtokens.errors import UserError, unknown
from visualtokens.files import read_json
from visualtokens.reduce.attention import parts_of
from visualtokens.reduce.blocks import attentions
from visualtokens.reduce.encoder import linear_weights
from visualtokens.reduce.families import encoder_of

Keep = str | float | Sequence[int] | Sequence[float]

# Token Pooling Tables 3 to 5: tokens after each of 12 blocks at sparsity levels 0 to 7, for 196 patches.
# PAPER: two rows are misprinted. deit_small/6 has an extra 0 at the end, deit_e252/0 lacks one 177; as
# corrected here, both have 12 entries and the printed cost.
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
    """One entry per block for the tokens that it keeps; prefix tokens (class, registers) are not counted.

    | entry | the block keeps |
    |---|---|
    | int, 0 or more | that many tokens |
    | negative int | that many fewer than its input has, but at least half of them |
    | float, 0 to 1 | this share of the image's patches, rounded up |

    A block whose entry exceeds the number of its input tokens keeps all of them.
    """

    entries: tuple[int | float, ...]

    @classmethod
    def of(cls, keep: Keep, blocks: int) -> Schedule:
        """The schedule of a model with this number of ``blocks``.

        | keep | meaning |
        |---|---|
        | sequence | one entry per block, as above |
        | float, 0 to 1 | share of the patches left after the last block; all blocks keep the same ratio |
        | negative int | tokens that every block removes, at most half of them (r of token merging) |
        | ``"deit_small/3"`` | a schedule of Token Pooling's Tables 3 to 5, as shares of its 196 patches |
        | ``"plan.json"`` | the schedule of a saved :class:`~visualtokens.tune.planning.Plan`, likewise |
        """
        if isinstance(keep, str) and keep.endswith(".json"):
            entries: tuple[int | float, ...] = _planned(keep)
        elif isinstance(keep, str):
            entries = _published(keep)
        elif isinstance(keep, Sequence):
            entries = tuple(_entry(value, f"keep[{i}]") for i, value in enumerate(keep))
        else:
            entries = _uniform(_entry(keep, "keep"), blocks)
        if len(entries) != blocks:
            raise UserError(f"keep has {len(entries)} entries, the model {blocks} blocks; give one per block")
        return cls(entries)

    def tokens(self, patches: int) -> tuple[int, ...]:
        """The number of tokens after each block, for an image with this number of ``patches``."""
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
            f"keep={value} is one number for {blocks} blocks; give keep=-{value} to remove {value} tokens in "
            f"every block, keep=[{value}] * {blocks} to keep {value} after each, or a share such as 0.5"
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


def _planned(path: str) -> tuple[float, ...]:
    """The shares of the patches that a saved plan keeps."""
    plan = read_json(Path(path))
    keep, patches = plan.get("keep"), plan.get("patches")
    if not isinstance(keep, list) or not isinstance(patches, int) or patches < 1:
        raise UserError(f"{path!r} is not a plan; give a file that Plan.save or `vtok reduce --plan` wrote")
    counts = [_entry(value, f"keep[{i}] of {path}") for i, value in enumerate(keep)]
    if not all(0 <= count <= patches for count in counts):
        raise UserError(f"{path!r} keeps {keep} of {patches} patches; give numbers from 0 to {patches}")
    return tuple(count / patches for count in counts)


def published_schedules() -> list[str]:
    """The names of the published schedules, which ``keep`` accepts."""
    return [f"{model}/{level}" for model, levels in PUBLISHED.items() for level in range(len(levels))]


# Multiply-adds of one image, from the shapes alone. A block of width e with n tokens before its pool and m
# after it costs 4·n·e² + 2·n²·e for the attention and 8·m·e² for the MLP (in general, n and m times the
# weights of their linear layers), plus the pool. visualtokens.bench.count_macs counts the same on the
# running model.


class Macs(NamedTuple):
    """Multiply-adds of one image, those of the blocks one by one."""

    stem: int
    attention: tuple[int, ...]
    pooling: tuple[int, ...]
    mlp: tuple[int, ...]
    head: int

    @property
    def total(self) -> int:
        return self.stem + sum(self.attention) + sum(self.pooling) + sum(self.mlp) + self.head


def macs(model: nn.Module, *, patches: int | None = None, keep: Sequence[int] | None = None) -> Macs:
    """The multiply-adds of a vision transformer, plain or reduced, for one image.

    Of a model around the transformer (the classifier of a transformers model, a text tower) nothing counts.

    ``patches`` is the number of patches of the image, by default that of the model's own image size. ``keep``
    overrides the tokens after each block of a reduced model.
    """
    encoder = encoder_of(model)
    patches = encoder.patches if patches is None else patches
    after: Sequence[int] = (patches,) * len(encoder.blocks)
    if keep is not None:
        after = keep
    elif encoder.reduced and encoder.module.reduction.threshold is not None:
        raise UserError(
            "with a threshold the tokens depend on the image; give keep, the tokens after each block, or "
            "count with visualtokens.bench.count_macs"
        )
    elif encoder.reduced:
        after = encoder.module.reduction.schedule.tokens(patches)
    attention, pooling, mlp = [], [], []
    present, prefix = patches, encoder.prefix
    for block, k in zip(encoder.blocks, after, strict=False):  # timm may have pruned the last blocks
        own: Any = block
        parts = attentions(block)
        shapes = [parts_of(attn).shape(attn) for attn in parts]  # heads, D
        n, weights = prefix + present, sum(map(linear_weights, parts))
        acts = encoder.reduced and own.reduction.pool.acts(present, k)
        queries = prefix if acts and k == 0 else n  # tokens that are dropped ask nothing
        keys_and_values = sum(map(_of_keys_and_values, parts))
        attention.append(
            n * keys_and_values
            + queries * (weights - keys_and_values)
            + 2 * queries * n * sum(heads * head_dim for heads, head_dim in shapes)
        )
        keys = sum(head_dim for _, head_dim in shapes)
        pooling.append(own.reduction.pool.macs(present, k, encoder.dim, keys) if acts else 0)
        mlp.append((prefix + k) * (linear_weights(block) - weights))
        present = k
    stem, head = encoder.stem_macs(patches), encoder.head_macs(patches)
    return Macs(stem, tuple(attention), tuple(pooling), tuple(mlp), head)


def _of_keys_and_values(attn: Any) -> int:
    """The weights of the projections to keys and values."""
    if isinstance(attn, nn.MultiheadAttention):
        return 2 * attn.in_proj_weight.numel() // 3
    if getattr(attn, "qkv", None) is not None:
        return 2 * attn.qkv.weight.numel() // 3
    return attn.k_proj.weight.numel() + attn.v_proj.weight.numel()
