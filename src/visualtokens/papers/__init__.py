"""The figures that the four papers publish, and what this library makes of them."""

from visualtokens.papers.figures import Published, published, schedule
from visualtokens.papers.reproduce import Row, rows, table, to_dicts

__all__ = ["Published", "Row", "published", "rows", "schedule", "table", "to_dicts"]
