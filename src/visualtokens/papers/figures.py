"""The figures that the papers print, as data (``published.csv``).

The csv holds every figure as printed, misprints included; only zeros at the end of a decimal number are
not kept (0.70 is 0.7). Corrections are here, in code.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources

from visualtokens.errors import unknown

# What can be computed from a model alone. Everything else (accuracy, speed, memory) is a result.
COSTS = frozenset(
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
    variant: str  # of the model, or the conditions it was measured under; may be empty
    input: str  # height×width as "224x224"; empty where the paper does not say
    metric: str
    value: str  # as printed

    @property
    def number(self) -> float:
        return float(self.value)

    @property
    def decimals(self) -> int:
        """Digits behind the point."""
        return len(self.value.partition(".")[2])

    @property
    def is_cost(self) -> bool:
        """Whether a model alone decides it, without data, training or a particular machine."""
        return self.metric in COSTS

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
    """The printed figures, all of them or those of one paper, table, model or metric, in printed order."""
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


# Token Pooling prints one schedule with 13 entries and one with 11 for models of 12 blocks. With these,
# the printed costs come out: a 0 too many at the end, and a 177 too few.
_MISPRINTS = {
    ("deit_s", "186 162 102 56 13 4 2 2 0 0 0 0 0"): "186 162 102 56 13 4 2 2 0 0 0 0",
    ("deit_e252", "196 196 196 195 193 189 177 177 177 177 177"): (
        "196 196 196 195 193 189 177 177 177 177 177 177"
    ),
}


def schedule(model: str, sparsity: int) -> tuple[int, ...]:
    """How many tokens Token Pooling keeps after each block (Tables 3 to 5), misprints corrected.

    ``model`` is ``deit_s``, ``deit_e318`` or ``deit_e252``, ``sparsity`` 0 to 7.
    """
    printed = published("token-pooling", metric="tokens_after_block")
    schedules = {(f.model, f.variant): f.value for f in printed}
    if model not in {m for m, _ in schedules}:
        raise unknown("model with schedules", model, {m for m, _ in schedules})
    variant = f"sparsity={sparsity}"
    if (model, variant) not in schedules:
        raise unknown(f"schedule of {model}", variant, {v for m, v in schedules if m == model})
    value = schedules[model, variant]
    return tuple(map(int, _MISPRINTS.get((model, value), value).split()))
