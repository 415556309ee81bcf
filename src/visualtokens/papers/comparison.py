"""Published figures next to the values computed from this library's models."""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from visualtokens.bench.comparison import WIDTH, align
from visualtokens.papers.figures import Published, Reason, published, reasons
from visualtokens.papers.models import MODELS
from visualtokens.papers.verdicts import Verdict, verdict_for


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

    @property
    def reason(self) -> Reason | None:
        """Why the figures differ; None if they agree, or if no reason is known."""
        return reasons().get(self.published.key) if self.agrees is False else None

    @property
    def verdicts(self) -> list[Verdict]:
        """What our small trainings say about this result; a cost has none."""
        figure = self.published
        return [] if figure.is_cost else verdict_for(figure.paper, figure.table, figure.model, figure.variant)

    @property
    def unexplained(self) -> bool:
        """Whether the figures differ for no known reason."""
        return self.agrees is False and self.reason is None


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
    other = entry.other[figure.metric]
    return Row(figure, computed, other.count(model, size), other.name)


def to_dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as JSON-serialisable dictionaries."""
    return [
        asdict(row.published)
        | {"computed": row.computed, "difference_percent": row.difference, "agrees": row.agrees}
        | ({row.other_name: row.other} if row.other_name else {})
        | ({"reason": row.reason.kind, "explanation": row.reason.text} if row.reason else {})
        | ({"verdicts": [asdict(each) for each in row.verdicts]} if row.verdicts else {})
        for row in rows
    ]


COLUMNS = ("model", "input", "metric", "published", "computed", "difference", "")


def table(rows: Sequence[Row]) -> str:
    """The rows as text, grouped by the papers' tables, with totals at the end; at most 100 columns wide.

    Each table is followed by the reasons of its differences. Costs without a computed value are not listed,
    only counted in the totals.
    """
    listed = [row for row in rows if row.computed is not None or not row.published.is_cost]
    groups = [(title, list(group)) for title, group in itertools.groupby(listed, key=_title)]
    notes = [_notes(group) for _, group in groups]
    cells = [
        line
        for (_, group), found in zip(groups, notes, strict=True)
        for row in group
        for line in _lines(row, found)
    ]
    header, *lines = align([COLUMNS, *cells])
    rest, out = iter(lines), []
    for (title, group), found in zip(groups, notes, strict=True):
        out += [title, header, *itertools.islice(rest, sum(len(_lines(row, found)) for row in group))]
        for reason, number in found.items():
            text = f"[{number}] {reason.kind}: {reason.text}"
            out += textwrap.wrap(text, WIDTH, subsequent_indent="    ")
        out.append("")
    return "\n".join([*out, *_totals(rows)])


def _notes(rows: Sequence[Row]) -> dict[Reason, int]:
    """The numbers of the reasons of one table, in order."""
    found = dict.fromkeys(row.reason for row in rows if row.reason)
    return {reason: number for number, reason in enumerate(found, start=1)}


def _title(row: Row) -> str:
    paper, name = row.published.paper, row.published.table
    if name.startswith("text-"):
        return f"{paper}, section {name.removeprefix('text-')}"
    return f"{paper}, table {name}"


def _lines(row: Row, notes: dict[Reason, int]) -> list[tuple[str, ...]]:
    """The cells of a row, and of a second line if it is also counted in another way."""
    first = (*_cells(row), _verdict(row, notes))
    if row.other is None:
        return [first]
    other = Row(row.published, row.other)
    return [first, ("", "", row.other_name, *_cells(other)[3:], "as printed" if other.agrees else "")]


def _cells(row: Row) -> tuple[str, ...]:
    figure = row.published
    first, *rest = figure.value.split()
    printed = f"{first} … {rest[-1]}" if rest else first  # a schedule has one number per block
    known = (f"{figure.model} {figure.variant}".rstrip(), figure.input, figure.metric, printed)
    if row.computed is None or row.difference is None:
        return *known, "", ""
    return *known, f"{row.computed:.{figure.decimals + 2}f}", f"{row.difference:+.1f} %"


def _verdict(row: Row, notes: dict[Reason, int]) -> str:
    """Whether a computed figure agrees, or what our small trainings say about a published result."""
    if row.agrees is None:
        return ", ".join(dict.fromkeys(found.verdict for found in row.verdicts))
    if row.reason:
        return f"{row.reason.kind} [{notes[row.reason]}]"
    return "as printed" if row.agrees else "unexplained"


def _totals(rows: Sequence[Row]) -> list[str]:
    costs = [row for row in rows if row.published.is_cost]
    compared = [row for row in costs if row.computed is not None]
    agree = sum(bool(row.agrees) for row in compared)
    lines = ["No published costs."]
    if costs:
        kinds = Counter(r.reason.kind if r.reason else "unexplained" for r in compared if not r.agrees)
        named = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
        lines = [f"{len(compared)} figures compared: {agree} as printed, {len(compared) - agree} differ."]
        lines += [f"Differences by reason: {named}."] if named else []
    if len(compared) < len(costs):
        lines.append(f"{len(costs) - len(compared)} costs of models that this version does not include.")
    if len(costs) < len(rows):
        lines.append(f"{len(rows) - len(costs)} results listed as published; they are not computed.")
    return lines
