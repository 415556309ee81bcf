"""The figures printed in the papers (``published.csv``), and why some differ from ours (``reasons.csv``).

published.csv holds every figure as printed, misprints included. Only trailing zeros of decimals are dropped
(0.70 is stored as 0.7). reasons.csv has a line for each figure that the computed one does not round to.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

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
    def key(self) -> Key:
        """Identifies the figure."""
        return self.paper, self.table, self.model, self.variant, self.metric

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
    return tuple(Published(**row) for row in _read_csv("published.csv"))


def _read_csv(name: str) -> Iterable[dict[str, str]]:
    text = resources.files("visualtokens.papers").joinpath(name).read_text("utf-8")
    return csv.DictReader(text.splitlines())


# The kinds of reasons in reasons.csv.
KINDS = {
    "rounding": "printed with another rounding",
    "counting": "counted in another way",
    "contradiction": "the paper contradicts itself",
    "model": "the paper's model has a layer that it does not describe",
}


class Reason(NamedTuple):
    """Why a published figure differs from the computed one."""

    kind: str  # one of KINDS
    text: str


Key = tuple[str, str, str, str, str]  # paper, table, model, variant, metric


@functools.cache
def reasons() -> Mapping[Key, Reason]:
    """The reasons by paper, table, model, variant and metric."""
    return {
        (row["paper"], row["table"], row["model"], row["variant"], row["metric"]): Reason(
            row["kind"], row["reason"]
        )
        for row in _read_csv("reasons.csv")
    }


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
