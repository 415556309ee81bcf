"""Published figures next to the values computed from this library's models."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from visualtokens.bench.comparison import align
from visualtokens.papers.figures import Published, published
from visualtokens.papers.models import MODELS


@dataclass(frozen=True)
class Row:
    """A published figure and the computed value, None if there is none.

    ``other`` is the value by a second way of counting, which ``other_name`` names.
    """

    published: Published
    computed: float | None
    other: float | None = None
    other_name: str = ""

    @property
    def difference(self) -> float | None:
        """Difference of the computed from the published value, in percent."""
        if self.computed is None:
            return None
        return 100 * (self.computed / self.published.number - 1)

    @property
    def agrees(self) -> bool | None:
        """Whether the computed value, rounded to the printed digits, equals the published one."""
        if self.computed is None:
            return None
        return round(self.computed, self.published.decimals) == self.published.number


def rows(paper: str | None = None, table: str | None = None, *, all: bool = False) -> list[Row]:
    """The published costs (parameters, multiply-adds) with the computed ones, in printed order.

    ``all=True`` adds the results that a model alone does not determine, without computed values: accuracy,
    and speed and memory on the authors' machines.
    """
    return [_row(figure) for figure in published(paper, table) if all or figure.is_cost]


def _row(figure: Published) -> Row:
    entry = MODELS.get((figure.paper, figure.model, figure.variant))
    size = figure.size or (entry.size if entry else None)
    if entry is None or size is None or figure.metric not in entry.metrics:
        return Row(figure, None)
    model = entry.build()
    computed = entry.metrics[figure.metric](model, size)
    if figure.metric not in entry.other:
        return Row(figure, computed)
    return Row(figure, computed, entry.other[figure.metric](model, size), entry.other_name)


def to_dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as JSON-serialisable dictionaries."""
    return [
        asdict(row.published)
        | {"computed": row.computed, "difference_percent": row.difference, "agrees": row.agrees}
        | ({row.other_name: row.other} if row.other_name else {})
        for row in rows
    ]


COLUMNS = ("model", "input", "metric", "published", "computed", "difference", "")


def table(rows: Sequence[Row]) -> str:
    """The rows as text, grouped by the papers' tables, with totals at the end; at most 100 columns wide.

    Costs without a computed value are not listed, only counted in the totals.
    """
    listed = [row for row in rows if row.computed is not None or not row.published.is_cost]
    cells = [(row, line) for row in listed for line in (_cells(row), _other_cells(row)) if line]
    header, *lines = align([COLUMNS, *(line for _, line in cells)])
    pairs = zip((row for row, _ in cells), lines, strict=True)
    out = []
    for title, group in itertools.groupby(pairs, key=lambda pair: _title(pair[0])):
        out += [title, header, *(line for _, line in group), ""]
    return "\n".join([*out, *_totals(rows)])


def _title(row: Row) -> str:
    paper, name = row.published.paper, row.published.table
    if name.startswith("text-"):
        return f"{paper}, section {name.removeprefix('text-')}"
    return f"{paper}, table {name}"


def _cells(row: Row) -> tuple[str, ...]:
    figure = row.published
    first, *rest = figure.value.split()
    printed = f"{first} … {rest[-1]}" if rest else first  # a schedule has one number per block
    known = (f"{figure.model} {figure.variant}".rstrip(), figure.input, figure.metric, printed)
    if row.computed is None or row.difference is None:
        return *known, "", "", ""
    computed = f"{row.computed:.{figure.decimals + 2}f}"
    return *known, computed, f"{row.difference:+.1f} %", "as printed" if row.agrees else "differs"


def _other_cells(row: Row) -> tuple[str, ...]:
    """The second line of a row that is also counted in another way."""
    if row.other is None:
        return ()
    return ("", "", row.other_name, *_cells(Row(row.published, row.other))[3:])


def _totals(rows: Sequence[Row]) -> list[str]:
    costs = [row for row in rows if row.published.is_cost]
    compared = [row for row in costs if row.computed is not None]
    agree = sum(bool(row.agrees) for row in compared)
    lines = ["No published costs."]
    if costs:
        lines = [f"{len(compared)} figures compared: {agree} as printed, {len(compared) - agree} differ."]
    if len(compared) < len(costs):
        lines.append(f"{len(costs) - len(compared)} costs of models that this version does not include.")
    if len(costs) < len(rows):
        lines.append(f"{len(rows) - len(costs)} results listed as published; they are not computed.")
    return lines
