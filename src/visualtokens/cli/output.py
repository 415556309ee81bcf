"""Output that several verbs share: unreadable images, and one result per image."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visualtokens.cli.verb import Result

if TYPE_CHECKING:
    from PIL import Image

    from visualtokens.data import BadImage

logger = logging.getLogger(__name__)
SHOWN = 20


def warn_unreadable(unreadable: Sequence[BadImage]) -> None:
    """List the unreadable images on stderr."""
    if not unreadable:
        return
    logger.warning("could not be read (%d):", len(unreadable))
    for bad in unreadable[:SHOWN]:
        logger.warning("  %s: %s", bad.path, bad.reason)
    if len(unreadable) > SHOWN:
        logger.warning("  and %d more; --json lists all", len(unreadable) - SHOWN)


def unreadable_as_json(unreadable: Sequence[BadImage]) -> list[dict[str, str]]:
    return [{"path": bad.path, "reason": bad.reason} for bad in unreadable]


def for_each_image(
    paths: Sequence[str], describe: Callable[[Image.Image, str, str], tuple[str, dict[str, Any]]]
) -> Result:
    """Return the text and the document that ``describe(image, path, name)`` gives for every image.

    ``name`` is unique, for output files. Unreadable images are listed and do not stop the others; the exit
    code is then 1.
    """
    from visualtokens.data import BadImage, read_image

    texts: list[str] = []
    documents: list[dict[str, Any]] = []
    unreadable: list[BadImage] = []
    for path, name in zip(paths, unique_names(paths), strict=True):
        try:
            image = read_image(path)
        except BadImage as bad:
            unreadable.append(bad)
            continue
        text, document = describe(image, path, name)
        texts.append(text)
        documents.append({"image": path, **document})
    warn_unreadable(unreadable)
    document = {"predictions": documents, "unreadable": unreadable_as_json(unreadable)}
    return Result("\n".join(texts), document, code=1 if unreadable else 0)


def unique_names(images: Sequence[str]) -> list[str]:
    """Return the file name of each image without its suffix, numbered where it repeats."""
    names: list[str] = []
    for path in images:
        stem, count = Path(path).stem, 2
        name = stem
        while name in names:
            name, count = f"{stem}_{count}", count + 1
        names.append(name)
    return names
