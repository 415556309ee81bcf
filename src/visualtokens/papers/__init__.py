"""Figures published in the four papers, next to the values computed here."""

from visualtokens.papers.architectures import architecture
from visualtokens.papers.comparison import Row, rows, table, to_dicts
from visualtokens.papers.figures import Published, Reason, published, reasons, schedule

__all__ = [
    "Published",
    "Reason",
    "Row",
    "architecture",
    "published",
    "reasons",
    "rows",
    "schedule",
    "table",
    "to_dicts",
]
