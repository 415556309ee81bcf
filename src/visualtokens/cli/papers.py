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
    """Number of a table of the paper; by default all with figures. visual-transformers 11 and paca-vit 1
    describe architectures and are printed from the models."""

    all: bool = False
    """Also show figures that are not recomputed: accuracy, and speed and memory on the authors' machines."""

    unexplained: bool = False
    """Show only computed figures that differ from the published ones for no known reason."""


def run(config: PapersConfig) -> Result:
    """Show the rows."""
    from visualtokens import papers

    table = None if config.table is None else str(config.table)
    described = papers.architecture(config.paper, table)
    if described is not None:
        return Result(described, {"architecture": described.splitlines()})
    rows = papers.rows(config.paper, table, all=config.all)
    if config.unexplained:
        rows = [row for row in rows if row.unexplained]
        if not rows:
            return Result("", {"rows": []})
    return Result(papers.table(rows), {"rows": papers.to_dicts(rows)})


VERB = Verb(config=PapersConfig, run=run, example="vtok papers paca-vit --table 2", positional="paper")
