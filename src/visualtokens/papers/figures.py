"""The figures printed in the papers (``published.csv``).

The csv holds every figure as printed, misprints included. Only trailing zeros of decimals are dropped
(0.70 is stored as 0.7).
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources

from visualtokens.errors import unknown
from visualtokens.reduce.schedule import PUBLISHED

# Metrics that depend on the model only. All others (accuracy, speed, memory) are results.
COST_METRICS = frozenset(
    {
        "mparams",
        "mflops",
        "gflops",
        "gflops_total",
        "gflops_fpn",
        "gflops_clustering",
        "flops_total_ratio",
        "flops_stage5_ratio",
        "params_total_ratio",
        "params_stage5_ratio",
    }
)


@dataclass(frozen=True)
class Published:
    """One figure of one table."""

    paper: str
    table: str
    model: str
    variant: str  # of the model or the experiment; may be empty
    input: str  # height×width such as "224x224"; empty if the paper does not state it
    metric: str
    value: str  # as printed

    @property
    def number(self) -> float:
        return float(self.value)

    @property
    def decimals(self) -> int:
        """Number of printed decimals."""
        return len(self.value.partition(".")[2])

    @property
    def is_cost(self) -> bool:
        """Whether the figure depends on the model only, not on data, training or hardware."""
        return self.metric in COST_METRICS

    @property
    def size(self) -> tuple[int, int] | None:
        """``input`` as (height, width)."""
        if not self.input:
            return None
        height, width = map(int, self.input.split("x"))
        return height, width


def published(
    paper: str | None = None,
    table: str | None = None,
    *,
    model: str | None = None,
    metric: str | None = None,
) -> list[Published]:
    """The figures in printed order, optionally only those of one paper, table, model or metric."""
    figures: Iterable[Published] = _read()
    for field, wanted in dict(paper=paper, table=table, model=model, metric=metric).items():
        if wanted is not None:
            names = {getattr(f, field) for f in figures}
            if wanted not in names:
                raise unknown(f"{field} of {paper}" if paper and field != "paper" else field, wanted, names)
            figures = [f for f in figures if getattr(f, field) == wanted]
    return list(figures)


@functools.cache
def _read() -> tuple[Published, ...]:
    text = resources.files("visualtokens.papers").joinpath("published.csv").read_text("utf-8")
    return tuple(Published(**row) for row in csv.DictReader(text.splitlines()))


def schedule(model: str, sparsity: int) -> tuple[int, ...]:
    """The number of tokens after each block (Token Pooling, Tables 3 to 5), with misprints corrected.

    ``model`` is ``deit_s``, ``deit_e318`` or ``deit_e252``; ``sparsity`` is 0 to 7.
    """
    schedules = {name.replace("deit_small", "deit_s"): levels for name, levels in PUBLISHED.items()}
    if model not in schedules:
        raise unknown("model with schedules", model, schedules)
    if sparsity not in range(len(schedules[model])):
        levels = [f"sparsity={level}" for level in range(len(schedules[model]))]
        raise unknown(f"schedule of {model}", f"sparsity={sparsity}", levels)
    return schedules[model][sparsity]
