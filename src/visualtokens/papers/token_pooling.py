"""Token Pooling's models: DeiT of three widths at eight levels of sparsity, with each method."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import timm
from torch import nn

import visualtokens.models  # noqa: F401  registers our models with timm
from visualtokens.bench import macs_by_module
from visualtokens.reduce import reduce
from visualtokens.reduce.methods import KMeans, KMedoids
from visualtokens.reduce.reduction import Method
from visualtokens.reduce.schedule import PUBLISHED

# As published.csv calls them: the paper's widths, and its methods. Weights cost nothing.
BASES = {"deit_s": "deit_small", "deit_e318": "deit_e318", "deit_e252": "deit_e252"}
METHODS: dict[str, Method] = {
    "power-bert": "power_bert",
    "kmeans": "kmeans",
    "weighted-kmeans": "kmeans",
    "kmedoids": "kmedoids",
    "weighted-kmedoids": "kmedoids",
}
# Table 2 names its models by their cost alone: these are the ones of Tables 3 to 5 that have it. In row 12
# PoWER-BERT has another width than the other two.
BEST = {
    "row1": ("deit_e252", 7),
    "row2": ("deit_e252", 6),
    "row3": ("deit_e252", 5),
    "row4": ("deit_e318", 6),
    "row5": ("deit_e252", 4),
    "row6": ("deit_e252", 3),
    "row7": ("deit_e252", 2),
    "row8": ("deit_e252", 1),
    "row9": ("deit_e318", 4),
    "row10": ("deit_e318", 3),
    "row11": ("deit_e318", 2),
    "row12": ("deit_small", 4),
    "row13": ("deit_small", 3),
    "row14": ("deit_small", 2),
    "row15": ("deit_small", 1),
    "row16": ("deit_small", 0),
}
ROW_12_POWER_BERT = ("deit_e318", 1)


class Setting(NamedTuple):
    """One reduced model."""

    base: str
    level: int
    method: Method

    def build(self) -> nn.Module:
        name = f"{self.base}_patch16_224" if self.base == "deit_small" else self.base
        start: dict[str, Any] = {} if self.method == "power_bert" else {"init": "significance"}
        return reduce(timm.create_model(name), self.method, keep=f"{self.base}/{self.level}", **start)


def settings() -> Iterator[tuple[str, str, Setting]]:
    """Every reduced model in the paper's tables, by the model and variant of published.csv."""
    for model, base in BASES.items():
        for level in range(len(PUBLISHED[base])):
            for name, method in METHODS.items():
                if base == "deit_small" or "kmeans" not in name:
                    yield model, f"sparsity={level} {name}", Setting(base, level, method)
    for row, (base, level) in BEST.items():
        for name in ("power-bert", "kmedoids", "weighted-kmedoids"):
            other = row == "row12" and name == "power-bert"
            yield row, name, Setting(*(ROW_12_POWER_BERT if other else (base, level)), METHODS[name])


@functools.cache
def counted(model: nn.Module, size: tuple[int, int]) -> tuple[int, int]:
    """The multiply-adds of the running model, and of its pooling among them."""
    counts = macs_by_module(model, size, depth=None)
    return counts[""], sum(macs for name, macs in counts.items() if name.endswith(".reduction.pool"))


def idle(model: Any, size: tuple[int, int]) -> int:
    """What the paper counts where a block has nothing to do and does not run here.

    K-medoids: all distances in every block. K-means: where K is the number of tokens, two rounds of
    distances instead of four.
    """
    present, total = model.patch_embed.num_patches, 0
    for block, k in zip(model.blocks, model.reduction.schedule.tokens(present), strict=True):
        pool = block.reduction.pool
        if isinstance(pool, KMedoids) and k in (0, present):
            total += present**2 * model.embed_dim
        if isinstance(pool, KMeans) and k == present:
            total += 2 * present * k * model.embed_dim
        present = k
    return total


def gmacs(model: nn.Module, size: tuple[int, int]) -> float:
    return (counted(model, size)[0] + idle(model, size)) / 1e9


def clustering_gmacs(model: nn.Module, size: tuple[int, int]) -> float:
    return (counted(model, size)[1] + idle(model, size)) / 1e9


def gmacs_as_run(model: nn.Module, size: tuple[int, int]) -> float:
    return counted(model, size)[0] / 1e9
