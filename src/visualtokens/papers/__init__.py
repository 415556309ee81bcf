"""Figures published in the four papers, next to the values computed here."""

from visualtokens.papers.figures import Published, published, schedule
from visualtokens.papers.reproduce import Row, rows, table, to_dicts

__all__ = ["Published", "Row", "published", "rows", "schedule", "table", "to_dicts"]
