"""Published beside computed, as text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from visualtokens.bench.table import align
from visualtokens.papers.reproduce import Row

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
