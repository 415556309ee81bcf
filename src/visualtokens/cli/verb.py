"""What a verb of the command line is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Failure(Exception):
    """The command was right but the work failed; the message is one line, the exit code 1."""


@dataclass(frozen=True)
class Result:
    """What a verb found: for people as text, for programs as a JSON document."""

    text: str
    document: dict[str, Any]
    code: int = 0  # the exit code
    silent: bool = False  # another process prints it


@dataclass(frozen=True)
class Verb:
    """One verb. Its options are the fields of a dataclass, described by the docstring below each field."""

    config: type
    run: Callable[[Any], Result]  # takes one ``config``
    example: str
    positional: str | None = None  # the field that is given without a name
