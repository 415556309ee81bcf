"""What several verbs print alike: tables, images that could not be read, one result per image."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visualtokens.cli.parse import Result

if TYPE_CHECKING:
    from PIL import Image

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


Document = dict[str, Any]


def each_image(
    paths: Sequence[str],
    say: Callable[[Image.Image, str], Document],
    *,
    text: Callable[[Document], str],
) -> Result:
    """What ``say(image, name)`` finds on every image, where ``name`` is for the files that it writes.

    An image that cannot be read is named, and does not stop the others; the exit code is then 1.
    """
    from visualtokens.data import BadImage, read_image

    found: list[Document] = []
    unreadable: list[BadImage] = []
    for path, name in zip(paths, different_names(paths), strict=True):
        try:
            image = read_image(path)
        except BadImage as bad:
            unreadable.append(bad)
            continue
        found.append({"image": path, **say(image, name)})
    warn_unreadable(unreadable)
    document = {"predictions": found, "unreadable": unreadable_as_json(unreadable)}
    return Result("\n".join(map(text, found)), document, code=1 if unreadable else 0)


def different_names(images: Sequence[str]) -> list[str]:
    """What the files made of each image are called: its own name, numbered where another has the same."""
    names: list[str] = []
    for path in images:
        stem, count = Path(path).stem, 2
        name = stem
        while name in names:
            name, count = f"{stem}_{count}", count + 1
        names.append(name)
    return names
