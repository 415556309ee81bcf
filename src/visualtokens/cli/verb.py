"""What a verb of the command line consists of: its options, its result, its failures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from shlex import quote
from typing import TYPE_CHECKING, Any

from visualtokens.errors import UserError
from visualtokens.tasks.options import DataOptions, default_of

if TYPE_CHECKING:
    from visualtokens.data import BadImage
    from visualtokens.predict.formats import LineFormat
    from visualtokens.tasks import Prediction, Task
    from visualtokens.tasks.exported import ExportedTask


@dataclass(frozen=True)
class Verb:
    """One verb. Its options are the fields of a dataclass, described by the docstring below each field."""

    config: type
    run: Callable[[Any], Result | Stream]  # takes a ``config``
    example: str
    positional: str | tuple[str, ...] = ()  # the fields that are given without their names
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)  # titles and fields of parts of --help
    light: bool | Callable[[Any], bool] = (
        False  # needs no torch (with this ``config``), which is not imported
    )

    @property
    def positionals(self) -> tuple[str, ...]:
        return (self.positional,) if isinstance(self.positional, str) else self.positional


@dataclass(frozen=True)
class Result:
    """The output of a verb, as text and as a JSON document."""

    text: str
    document: dict[str, Any]
    code: int = 0  # exit code
    silent: bool = False  # printed by another process


@dataclass(frozen=True, eq=False)
class Predicted:
    """The prediction for one image, and the pictures of it that were saved."""

    image: str
    prediction: Prediction
    files: Mapping[str, str]  # by kind


@dataclass(frozen=True)
class Stream:
    """The output of a verb that is printed image by image."""

    results: Callable[[Callable[[], bool]], Iterable[Predicted | BadImage]]  # of a function that stops them
    images: int  # number of results
    format: LineFormat
    formatted: bool = False  # whether the format is not the default text, so that --json contradicts it


class Failure(Exception):
    """The options were right but the work failed; the message is one line, the exit code 1."""


def options_of_task(
    config: Any, task: Task | ExportedTask, *, common: Sequence[str], own: Sequence[str]
) -> dict[str, Any]:
    """Return the given options beyond the ``common`` ones of a verb; the task must have them in ``own``."""
    given = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in common and getattr(config, field.name) != default_of(field)
    }
    model = getattr(config, "onnx", None) or config.checkpoint
    for name, value in given.items():
        if name not in own:
            raise UserError(f"{name}={value} has no effect: {model} was trained to {task.name}; leave it out")
    return given


def data_arguments(data: str, config: DataOptions) -> str:
    """Return the arguments with which another verb opens the same data: ``--data …`` and its options."""
    given = {"data": data} | {f"data_args.{name}": value for name, value in config.data_args.items()}
    if config.val_share is not None:
        given["val_share"] = config.val_share
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items()}
    return " ".join(f"--{name} {quote(text)}" for name, text in texts.items())
