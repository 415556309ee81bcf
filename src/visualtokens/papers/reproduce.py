"""Published beside computed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

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
