"""A comparison as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from visualtokens.bench.stats import MIN_ROUNDS

if TYPE_CHECKING:
    from visualtokens.bench.comparison import Comparison, ComparisonRow

WIDTH = 100
COLUMNS = ("model", "Mparams", "GMACs", "images/s", "peak MB", "speed", "")
MODES = {
    "eager": "forward, eager",
    "channels_last": "forward, eager, channels last",
    "compile": "forward, compiled by inductor (compile time not included)",
    "train": "forward and backward in training mode, no optimizer",
}


def text_table(comparison: Comparison) -> str:
    """Two header lines, one line per candidate, what the columns mean, and whether to trust it."""
    cells = [COLUMNS, *(_cells(row) for row in comparison.rows)]
    lines = [*_header(comparison), "", *align(cells), "", *_legend(comparison)]
    return "\n".join(lines)


def align(cells: Sequence[Sequence[str]], *, width: int = WIDTH) -> list[str]:
    """Columns under each other: the first to the left, the last as it is, the others to the right.

    One string per row. A first cell that would make its row longer than ``width`` stands on a line of
    its own above the rest of the row.
    """
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[0] = min(widths[0], width - sum(widths[1:]) - 2 * (len(widths) - 1))
    rows = []
    for first, *middle, last in cells:
        above, first = (f"{first}\n", "") if len(first) > widths[0] else ("", first)
        right = [cell.rjust(w) for cell, w in zip(middle, widths[1:-1], strict=True)]
        rows.append(above + "  ".join([first.ljust(widths[0]), *right, last]).rstrip())
    return rows


def _header(comparison: Comparison) -> list[str]:
    m, (height, width) = comparison.machine, comparison.size
    chip = m["cpu"] if m["device"] == "cpu" else f"{m['gpu']} on {m['cpu']}"
    images = f"{comparison.batch} images of {height}×{width}"
    return [
        f"{chip}, {m['cores']} cores, {m['threads']} threads, torch {m['torch']}",
        f"{images}, {MODES[comparison.mode]}, {comparison.rounds} rounds",
    ]


def _cells(row: ComparisonRow) -> tuple[str, ...]:
    rate, ratio = row.images_per_second, row.ratio
    digits = 1 if rate.median < 1000 else 0
    return (
        row.name,
        "–" if row.parameters is None else f"{row.parameters / 1e6:.2f}",
        "–" if row.macs is None else f"{row.macs / 1e9:.3f}",
        f"{rate.median:.{digits}f} ±{rate.half:.{digits}f}",
        f"{row.peak_bytes / 1e6:.1f}",
        "1" if row.word is None else f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})",
        row.word or "reference",
    )


def _legend(comparison: Comparison) -> list[str]:
    first, turns = comparison.rows[0].name, len(comparison.rows) * comparison.rounds
    interval = "95 % interval" if comparison.rounds >= MIN_ROUNDS else "whole range"
    lines = [
        "images/s: median over the rounds ± half the interquartile range. peak: above weights and input.",
        f"speed: against {first}, paired by round: the median (and its {interval}).",
    ]
    if comparison.discarded:
        lines.append(
            f"{comparison.discarded} turns were repeated: beside them a matrix product took "
            f"{comparison.tolerance:.0%} longer than its best, or more."
        )
    if comparison.noisy:
        lines.append(
            f"THE MACHINE WAS NEVER QUIET: {comparison.noisy} of {turns} turns are disturbed; "
            "do not trust small differences."
        )
    return lines
