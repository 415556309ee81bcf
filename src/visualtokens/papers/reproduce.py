"""Published beside computed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from visualtokens.bench.comparison import align
from visualtokens.papers.figures import Published, published
from visualtokens.papers.models import MODELS, Entry, Metric


@dataclass(frozen=True)
class Row:
    """A published figure and what this library computes for it, None where it cannot.

    ``other`` is the same by another way of counting, which ``other_name`` names.
    """

    published: Published
    computed: float | None
    other: float | None = None
    other_name: str = ""

    @property
    def difference(self) -> float | None:
        """Of the computed from the published figure, in percent."""
        if self.computed is None:
            return None
        return 100 * (self.computed / self.published.number - 1)

    @property
    def agrees(self) -> bool | None:
        """Whether the computed figure, rounded to as many digits as were printed, is the published one."""
        if self.computed is None:
            return None
        return round(self.computed, self.published.decimals) == self.published.number


def rows(paper: str | None = None, table: str | None = None, *, all: bool = False) -> list[Row]:
    """What the papers print about cost (parameters, multiply-adds) beside what the models here have.

    Figures of models that are not in this version have no computed value. ``all=True`` adds the figures
    that no model has by itself, as published only: accuracy, and speed and memory on the authors'
    machines.
    """
    figures = [f for f in published(paper, table) if all or f.is_cost]
    return [_row(figure) for figure in figures]


def to_dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows ready for JSON."""
    return [
        asdict(row.published)
        | {"computed": row.computed, "difference_percent": row.difference, "agrees": row.agrees}
        | ({row.other_name: row.other} if row.other_name else {})
        for row in rows
    ]


def _row(figure: Published) -> Row:
    entry = MODELS.get((figure.paper, figure.model, figure.variant))
    if entry is None or figure.metric not in entry.metrics:
        return Row(figure, None)
    size = figure.size or entry.size
    if size is None:
        return Row(figure, None)
    computed = _value(entry, entry.metrics[figure.metric], size)
    if figure.metric not in entry.other:
        return Row(figure, computed)
    return Row(figure, computed, _value(entry, entry.other[figure.metric], size), entry.other_name)


@functools.cache
def _value(entry: Entry, metric: Metric, size: tuple[int, int]) -> float:
    return metric(_model(entry), size)


@functools.cache
def _model(entry: Entry) -> nn.Module:
    with torch.device("meta"):  # only shapes matter, so nothing is initialised and no memory taken
        return entry.build()


# Published beside computed, as text.

COLUMNS = ("model", "input", "metric", "published", "computed", "difference", "")


def table(rows: Sequence[Row]) -> str:
    """The rows, grouped by the papers' tables, and a count at the end; at most 100 columns wide.

    A cost whose model is not in this version is only counted.
    """
    shown = [row for row in rows if row.computed is not None or not row.published.is_cost]
    cells = [(row, line) for row in shown for line in (_cells(row), _other_cells(row)) if line]
    header, *lines = align([COLUMNS, *(line for _, line in cells)])
    pairs = zip((row for row, _ in cells), lines, strict=True)
    out = []
    for title, group in itertools.groupby(pairs, key=lambda pair: _title(pair[0])):
        out += [title, header, *(line for _, line in group), ""]
    return "\n".join([*out, *_closing(rows)])


def _title(row: Row) -> str:
    paper, name = row.published.paper, row.published.table
    if name.startswith("text-"):
        return f"{paper}, section {name.removeprefix('text-')}"
    return f"{paper}, table {name}"


def _cells(row: Row) -> tuple[str, ...]:
    figure = row.published
    first, *rest = figure.value.split()
    printed = f"{first} … {rest[-1]}" if rest else first  # a schedule has a number per block
    known = (f"{figure.model} {figure.variant}".rstrip(), figure.input, figure.metric, printed)
    if row.computed is None or row.difference is None:
        return *known, "", "", ""
    computed = f"{row.computed:.{figure.decimals + 2}f}"
    return *known, computed, f"{row.difference:+.1f} %", "as printed" if row.agrees else "differs"


def _other_cells(row: Row) -> tuple[str, ...]:
    """A second line under a figure that can be counted in another way, with that way's name."""
    if row.other is None:
        return ()
    counted = Row(row.published, row.other)
    return ("", "", row.other_name, *_cells(counted)[3:])


def _closing(rows: Sequence[Row]) -> list[str]:
    costs = [row for row in rows if row.published.is_cost]
    compared = [row for row in costs if row.computed is not None]
    agree = sum(bool(row.agrees) for row in compared)
    lines = ["No cost is published here."]
    if costs:
        lines = [
            f"{len(compared)} figures compared: {agree} come out as printed, {len(compared) - agree} differ."
        ]
    if len(compared) < len(costs):
        lines.append(f"{len(costs) - len(compared)} are of models that are not in this version.")
    if len(costs) < len(rows):
        lines.append(f"{len(rows) - len(costs)} are results, shown as published: they are not computed.")
    return lines
