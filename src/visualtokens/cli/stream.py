"""Results of many images, printed as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from visualtokens.cli.output import unreadable_as_json, warn_unreadable
from visualtokens.cli.terminal import to_json, write, write_error
from visualtokens.cli.verb import Stream
from visualtokens.progress import one_image, track

if TYPE_CHECKING:
    from PIL import Image

    from visualtokens.data import BadImage


def for_each_image(
    paths: Sequence[str], describe: Callable[[Image.Image, str, str], tuple[str, dict[str, Any]]]
) -> Stream:
    """Return the text and the document that ``describe(image, path, name)`` gives for every image.

    ``name`` is unique, for output files. Unreadable images do not stop the others.
    """
    from visualtokens.data import BadImage, read_image

    def result(path: str, name: str) -> tuple[str, dict[str, Any]] | BadImage:
        try:
            image = read_image(path)
        except BadImage as bad:
            return BadImage(bad.path, bad.reason)  # without the traceback, which holds the decoded pixels
        text, document = describe(image, path, name)
        return text, {"image": path, **document}

    return Stream((result(*pair) for pair in zip(paths, unique_names(paths), strict=True)), len(paths))


def unique_names(images: Sequence[str]) -> Iterator[str]:
    """Yield the file name of each image without its suffix, numbered where it repeats."""
    counts: dict[str, int] = {}
    for path in images:
        name = stem = Path(path).stem
        while name in counts:
            counts[stem] += 1
            name = f"{stem}_{counts[stem]}"
        counts[name] = 1
        yield name


def print_stream(stream: Stream, *, as_json: bool) -> int:
    """Print each result as soon as it is known, list unreadable images at the end; return the exit code.

    The first SIGINT or SIGTERM stops after the current image, the second one ends the process.
    """
    from visualtokens.data import BadImage
    from visualtokens.train.distributed import catch_signals

    printer: _TextPrinter | _JsonPrinter = _JsonPrinter() if as_json else _TextPrinter()
    unreadable: list[BadImage] = []
    done = 0
    with catch_signals() as stop:
        try:
            # A bar for a single image would only flicker.
            shown = None if stream.images > 1 else False
            for result in track(
                stream.results, "predict", total=stream.images, unit="images", images=one_image, shown=shown
            ):
                if isinstance(result, BadImage):
                    unreadable.append(result)
                else:
                    printer.add(*result)
                done += 1
                if stop:
                    break
        except BaseException:
            if printer.started:
                printer.close(unreadable, interrupted=True)
            raise
        interrupted = done < stream.images
        printer.close(unreadable, interrupted=interrupted)
    warn_unreadable(unreadable)
    if interrupted and stop.signal is not None:
        write_error(f"interrupted after {done} of {stream.images} images\n")
        return 128 + stop.signal
    return 1 if unreadable else 0


class _TextPrinter:
    """Prints the text of every result."""

    started = False

    def add(self, text: str, document: dict[str, Any]) -> None:
        write(f"{text}\n")

    def close(self, unreadable: Sequence[BadImage], *, interrupted: bool) -> None:
        """End the output."""


class _JsonPrinter:
    """Prints the document ``{"predictions": [...], "unreadable": [...]}`` piece by piece.

    An interrupted one is closed with ``"interrupted": true``.
    """

    def __init__(self) -> None:
        self.started = False

    def add(self, text: str, document: dict[str, Any]) -> None:
        head = "," if self.started else '{\n  "predictions": ['
        write(f"{head}\n{indent(to_json(document), ' ' * 4)}")
        self.started = True

    def close(self, unreadable: Sequence[BadImage], *, interrupted: bool) -> None:
        """End the document."""
        rest = {"unreadable": unreadable_as_json(unreadable)} | ({"interrupted": True} if interrupted else {})
        predictions = "\n  ]" if self.started else '{\n  "predictions": []'
        write(f"{predictions},{to_json(rest).removeprefix('{')}\n")
