"""``vtok papers``."""

from __future__ import annotations

from dataclasses import dataclass

from visualtokens.cli.verb import Result, Verb


@dataclass(frozen=True, kw_only=True)
class PapersConfig:
    """Show the published figures of the papers beside those of this library."""

    paper: str | None = None
    """Paper: paca-vit, stvit, token-pooling or visual-transformers; by default all."""

    table: str | int | None = None
    """Number of a table of the paper; by default all."""

    all: bool = False
    """Also show figures that are not recomputed: accuracy, and speed and memory on the authors' machines."""


def run(config: PapersConfig) -> Result:
    """Show the rows."""
    from visualtokens import papers

    table = None if config.table is None else str(config.table)
    rows = papers.rows(config.paper, table, all=config.all)
    return Result(papers.table(rows), {"rows": papers.to_dicts(rows)})


VERB = Verb(config=PapersConfig, run=run, example="vtok papers paca-vit --table 2", positional="paper")
