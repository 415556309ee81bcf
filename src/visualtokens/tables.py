"""Plain text for terminals: tables, names of metrics, and text without control characters."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Control characters, line separators, bidirectional overrides, and surrogates, which stand for the bytes of
# file names that are not UTF-8.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_METRIC_WORDS = {"miou": "mIoU", "iou": "IoU", "ap": "AP", "ap50": "AP50", "ap75": "AP75"}


def printable(text: str, *, keep: str = "") -> str:
    r"""Return the text with unprintable characters except those in ``keep`` escaped, such as ``\x1b``.

    Names of classes and files are shown through it: they may contain sequences that move the cursor, forge
    lines or reverse the order of the text.
    """
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else _escape(ord(found[0])), text)


def metric_name(name: str) -> str:
    """Return the name of a metric as readers know it: ``box_ap50`` becomes ``box AP50``."""
    return " ".join(_METRIC_WORDS.get(word, word) for word in name.split("_"))


def _escape(code: int) -> str:
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8, as `os.fsdecode` returns it
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def table(rows: Sequence[Sequence[str]], *, header: Sequence[str], right: Sequence[int] = ()) -> str:
    """Return rows under a header, columns two spaces apart; the columns in ``right`` are right-aligned."""
    lines = [[printable(cell) for cell in cells] for cells in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            c.rjust(w) if i in right else c.ljust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, lines))
