"""What a checkpoint was trained for, which decides how a verb uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from visualtokens.errors import UserError, unknown

TASKS = ("classify", "segment", "detect")


def task_of(checkpoint: str) -> str:
    """What the model in the folder was trained for."""
    from visualtokens.checkpoint import read_config

    task = str(read_config(Path(checkpoint)).get("task", "classify"))
    if task not in TASKS:
        raise unknown(f"task of {checkpoint}", task, TASKS)
    return task


def refuse_others(config: Any, task: str, own: Mapping[str, Sequence[str]]) -> None:
    """:class:`UserError` for an option that is given although only another task makes use of it.

    ``own`` are the options of each task that others do not have.
    """
    allowed = set(own.get(task, ()))
    others = {name for names in own.values() for name in names} - allowed
    for field in fields(config):
        if field.name in others and getattr(config, field.name) != _default(field):
            raise UserError(
                f"{field.name}={getattr(config, field.name)} has no effect: {config.checkpoint} was trained "
                f"to {task}; leave it out"
            )


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def require_classes(data: str, found: Sequence[str], checkpoint: str, known: Sequence[str]) -> None:
    """:class:`UserError` if a dataset has other classes than a checkpoint."""
    if list(found) != list(known):
        raise UserError(
            f"{data} has {_brief(found)}, but {checkpoint} was trained for {_brief(known)}; "
            "the classes must be the same, in the same order"
        )


def _brief(classes: Sequence[str]) -> str:
    shown = ", ".join(classes[:3]) + (", …" if len(classes) > 3 else "")
    return f"{len(classes)} classes ({shown})"
