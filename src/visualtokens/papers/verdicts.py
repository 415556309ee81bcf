"""What our small trainings say about the claims of the papers (``verdicts.csv``).

``python docs/studies.py`` writes the csv from the results of ``vtok reproduce``.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from importlib import resources

FILE = "verdicts.csv"


@dataclass(frozen=True)
class Verdict:
    """One comparison of a study, with the rows of the paper's table that it corresponds to."""

    paper: str
    table: str
    rows: tuple[str, ...]  # model and variant, as in published.csv; may be empty
    metric: str
    study: str
    claim: str
    verdict: str
    difference: str  # in points, with its 95 % interval
    seeds: int


def verdict_for(paper: str, table: str, model: str = "", variant: str = "") -> list[Verdict]:
    """Return the verdicts on a table; with a model and a variant, those that concern this row."""
    row = f"{model} {variant}".strip()
    return [
        each
        for each in _read()
        if each.paper == paper and each.table == table and (not row or row in each.rows)
    ]


@functools.cache
def _read() -> tuple[Verdict, ...]:
    text = resources.files("visualtokens.papers").joinpath(FILE).read_text("utf-8")
    return tuple(_verdict(row) for row in csv.DictReader(text.splitlines()))


def _verdict(row: dict[str, str]) -> Verdict:
    rows = tuple(filter(None, row.pop("rows").split(";")))
    seeds = int(row.pop("seeds"))
    return Verdict(rows=rows, seeds=seeds, **row)
