"""What several verbs print alike."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from visualtokens.data import BadImage

logger = logging.getLogger(__name__)
SHOWN = 20


def warn_unreadable(unreadable: Sequence[BadImage]) -> None:
    """Name the images that could not be read, on stderr."""
    if not unreadable:
        return
    logger.warning("could not be read (%d):", len(unreadable))
    for bad in unreadable[:SHOWN]:
        logger.warning("  %s: %s", bad.path, bad.reason)
    if len(unreadable) > SHOWN:
        logger.warning("  and %d more; --json names all", len(unreadable) - SHOWN)


def unreadable_as_json(unreadable: Sequence[BadImage]) -> list[dict[str, str]]:
    return [{"path": bad.path, "reason": bad.reason} for bad in unreadable]


def table(rows: Sequence[Sequence[str]], *, header: Sequence[str], right: Sequence[int] = ()) -> str:
    """Rows under a header, in columns two spaces apart; the columns numbered in ``right`` align right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            c.rjust(w) if i in right else c.ljust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, [header, *rows]))
