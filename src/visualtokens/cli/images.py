"""What ``vtok predict`` does with image after image, whatever the model was trained for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visualtokens.cli.report import unreadable_as_json, warn_unreadable
from visualtokens.cli.verb import Result

if TYPE_CHECKING:
    from PIL import Image

    from visualtokens.data import BadImage

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
