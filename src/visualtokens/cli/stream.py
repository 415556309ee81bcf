"""Results of many images, printed as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Protocol

from visualtokens.cli.output import unreadable_as_json, warn_unreadable
from visualtokens.cli.terminal import to_json, write, write_bytes, write_error
from visualtokens.cli.verb import Predicted, Stream
from visualtokens.errors import UserError
from visualtokens.progress import count, one_image, track

if TYPE_CHECKING:
    from visualtokens.data.decode import BadImage


def unique_names(images: Iterable[str]) -> Iterator[str]:
    """Yield the file name of each image without its suffix, numbered where it repeats."""
    counts: dict[str, int] = {}
    for path in images:
        name = stem = Path(path).stem
        while name in counts:
            counts[stem] += 1
            name = f"{stem}_{counts[stem]}"
        counts[name] = 1
        yield name


def track_images(
    results: Iterable[Predicted | BadImage], total: int, *, shown: bool | None = None
) -> Iterator[Predicted | BadImage]:
    """Yield the results of ``total`` images and report the progress over them."""
    shown = shown if total > 1 else False  # a bar for a single image would only flicker
    return track(results, "predict", total=total, unit="image", images=one_image, shown=shown)


def print_stream(stream: Stream, *, as_json: bool) -> int:
    """Print each result as soon as it is known, list unreadable images at the end; return the exit code.

    The first SIGINT or SIGTERM stops after the current batch, the second one ends the process.
    """
    from visualtokens.data.decode import BadImage
    from visualtokens.processes import catch_signals

    if as_json and stream.formatted:
        raise UserError("--json prints one document, --format one result after the other; give one of them")
    printer: _Printer = _JsonPrinter() if as_json else _LinePrinter(stream)
    unreadable: list[BadImage] = []
    done = 0
    with catch_signals() as stop:
        try:
            for result in track_images(stream.results(stop.__bool__), stream.images):
                if isinstance(result, BadImage):
                    unreadable.append(result)
                    printer.skip(result)
                else:
                    printer.add(result)
                done += 1
        except BaseException:
            if printer.started:
                printer.close(unreadable, interrupted=True)
            raise
        interrupted = done < stream.images
        printer.close(unreadable, interrupted=interrupted)
    warn_unreadable(unreadable)
    if interrupted and stop.signal is not None:
        write_error(f"interrupted after {done} of {count(stream.images, 'image')}\n")
        return 128 + stop.signal
    return 1 if unreadable else 0


class _Printer(Protocol):
    """Prints results."""

    started: bool  # whether there is something to close

    def add(self, result: Predicted) -> None: ...

    def skip(self, bad: BadImage) -> None: ...

    def close(self, unreadable: Sequence[BadImage], *, interrupted: bool) -> None:
        """End the output."""


class _LinePrinter:
    """Prints the lines of every result; those of unreadable images in a chosen format."""

    def __init__(self, stream: Stream) -> None:
        self.format, self.with_errors = stream.format, stream.formatted
        self.started = False
        self._head = stream.format.head

    def add(self, result: Predicted) -> None:
        self._write(self.format.encode(self.format.record(result.image, result.prediction, result.files)))

    def skip(self, bad: BadImage) -> None:
        if self.with_errors:
            self._write(self.format.encode(self.format.unreadable(bad)))

    def _write(self, lines: bytes) -> None:
        if self.format.exact:
            write_bytes(self._head + lines)
        else:
            write((self._head + lines).decode())
        self._head = b""

    def close(self, unreadable: Sequence[BadImage], *, interrupted: bool) -> None:
        pass


class _JsonPrinter:
    """Prints the document ``{"predictions": [...], "unreadable": [...]}`` piece by piece.

    An interrupted one is closed with ``"interrupted": true``.
    """

    def __init__(self) -> None:
        self.started = False

    def add(self, result: Predicted) -> None:
        head = "," if self.started else '{\n  "predictions": ['
        document = {"image": result.image, **result.files, **result.prediction.to_dict()}
        write(f"{head}\n{indent(to_json(document), ' ' * 4)}")
        self.started = True

    def skip(self, bad: BadImage) -> None:
        pass  # listed at the end

    def close(self, unreadable: Sequence[BadImage], *, interrupted: bool) -> None:
        rest = {"unreadable": unreadable_as_json(unreadable)} | ({"interrupted": True} if interrupted else {})
        predictions = "\n  ]" if self.started else '{\n  "predictions": []'
        write(f"{predictions},{to_json(rest).removeprefix('{')}\n")
