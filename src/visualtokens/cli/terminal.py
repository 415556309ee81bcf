"""Writing to stdout and stderr: all text of the command line passes through here."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from visualtokens.files import json_ready
from visualtokens.progress import bars_hidden
from visualtokens.tables import printable


def prepare() -> None:
    """Escape characters that the encoding of stdout lacks, as Python does on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def write(text: str) -> None:
    """Write text to stdout, at once."""
    with bars_hidden():
        sys.stdout.write(printable(text, keep="\n\t"))
        sys.stdout.flush()


def write_bytes(data: bytes) -> None:
    """Write bytes to stdout, at once; on a terminal as printable text."""
    if sys.stdout.isatty():
        write(data.decode("utf-8", "surrogateescape"))
        return
    with bars_hidden():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def write_error(text: str) -> None:
    """Write text to stderr."""
    sys.stderr.write(printable(text, keep="\n\t"))


def discard_stdout() -> None:
    """Drop what stdout cannot take, so that Python does not report it a second time at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def discard_if_unwritable() -> None:
    """Drop the text for stdout if it cannot be written, for example to a full disk."""
    try:
        sys.stdout.flush()
    except OSError:
        discard_stdout()


def to_json(document: Any) -> str:
    """Return strict JSON in ASCII; numbers that are not finite, which JSON lacks, become null."""
    return json.dumps(json_ready(document), indent=2)


@contextlib.contextmanager
def log_to_stderr() -> Iterator[None]:
    """Show the log of the library, such as training epochs, on stderr; stdout is for results."""
    logger, handler = logging.getLogger("visualtokens"), _StderrHandler(sys.stderr)
    handler.setFormatter(_PrintableFormatter())
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes records above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        with bars_hidden():
            super().emit(record)


class _PrintableFormatter(logging.Formatter):
    """One printable line per record."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
