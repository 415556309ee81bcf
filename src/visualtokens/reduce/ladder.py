"""Schedules for every budget, from the whole model down to its class token.

Without fine-tuning the early blocks are the ones that bear pooling least, and what hurts most is to end with
very few tokens. So the first quarter of the blocks keeps everything and the others all keep the same share of
what they get; where that would leave less than a thirteenth in the end, pooling starts a block earlier.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn

from visualtokens.reduce.cost import macs
from visualtokens.reduce.reduction import Method, reduce, restore
from visualtokens.reduce.support import transformer

FEWEST = 1 / 13  # of the patches, as long as pooling can start earlier
STEPS = 60  # shares that are tried for each start


@dataclass(frozen=True)
class Rung:
    """A schedule and what it costs."""

    keep: tuple[int, ...]  # tokens left after each block
    macs: int  # of one image


def twin(model: nn.Module) -> nn.Module:
    """The plain model once more, on the same weights: reducing one leaves the other as it is."""
    shared = {id(weight): weight for weight in chain(model.parameters(), model.buffers())}
    other: nn.Module = copy.deepcopy(model, shared)
    return restore(other) if "reduction" in transformer(other).__dict__ else other


def own_size(model: nn.Module) -> tuple[int, int]:
    """The size of the images (H, W) that the model was made for."""
    vit: Any = transformer(model)
    height, width = vit.patch_embed.img_size
    return height, width


def ladder(model: nn.Module, method: Method, *, size: tuple[int, int]) -> list[Rung]:
    """Schedules for images of ``size`` in falling order of their multiply-adds, the whole model first."""
    other = twin(model)
    vit: Any = transformer(other)
    patches = math.prod(vit.patch_embed.dynamic_feat_size(size))
    fewest = 0 if vit.global_pool == "token" and vit.num_prefix_tokens else 1
    rungs: list[Rung] = []
    for keep in _schedules(len(vit.blocks), patches, fewest):
        reduce(other, method, keep=keep)
        tokens = vit.reduction.schedule.tokens(patches)  # of `conv`, not those that were asked for
        cost = macs(other, patches=patches).total
        if not rungs or cost < rungs[-1].macs:
            rungs.append(Rung(tokens, cost))
    return rungs


def _schedules(blocks: int, patches: int, fewest: int) -> Iterator[tuple[int, ...]]:
    yield (patches,) * blocks
    for whole in range(blocks // 4, -1, -1):
        lowest, steps = (FEWEST, STEPS) if whole else (1e-9, 3 * STEPS)
        for step in range(1, steps + 1):
            yield steady(lowest ** (step / steps), blocks, patches, whole=whole, fewest=fewest)
    yield (fewest,) * blocks


def steady(share: float, blocks: int, patches: int, *, whole: int = 0, fewest: int = 0) -> tuple[int, ...]:
    """``whole`` blocks keep all patches; then every block keeps an equal share, ``share`` in the end."""
    left = (share ** ((i + 1) / (blocks - whole)) for i in range(blocks - whole))
    return (patches,) * whole + tuple(max(fewest, math.ceil(patches * part - 1e-9)) for part in left)
