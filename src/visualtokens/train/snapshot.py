"""Snapshots, from which a run resumes bit for bit.

A snapshot is a folder such as ``snapshots/epoch_0002_step_00000140``, which gets this name when it is
complete: the model to evaluate in the Hub's layout, ``state.pt`` with the rest, and ``digests.json`` with the
SHA-256 of each of these files.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visualtokens.errors import UserError
from visualtokens.files import (
    CONFIG,
    WEIGHTS,
    as_dataclass,
    read_config,
    read_json,
    read_weights,
    remove_folder,
    write_config,
    write_folder,
    write_weights,
)

logger = logging.getLogger(__name__)

SNAPSHOTS = "snapshots"
STATE = "state.pt"
DIGESTS = "digests.json"
CONTENT = (STATE, WEIGHTS, CONFIG)
DAMAGED = ".damaged"  # suffix of a snapshot that was set aside
NAME = re.compile(r"epoch_\d{4,}_step_\d{8,}")


@dataclass(frozen=True)
class State:
    """The state of a run between two steps, besides the weights to evaluate."""

    epoch: int  # completed epochs, including their evaluation
    offset: int  # completed steps of the current epoch
    step: int  # completed steps of the run; schedule and randomness depend on it
    optimizer: dict[str, Any]
    trained: dict[str, Tensor] | None  # the trained weights, if the EMA weights are evaluated
    history: list[dict[str, Any]]  # one record per completed epoch
    stats: dict[str, Any]  # EpochStats of the current epoch
    skipped: int  # steps with a loss or gradient that was not finite
    skipped_in_a_row: int
    unreadable: dict[str, list[tuple[str, str]]]  # path and reason, of "train" and "val" images
    data: dict[str, Any] | None = None  # fingerprint of the data; None in older snapshots


class Snapshot(NamedTuple):
    """A snapshot that was loaded."""

    path: Path
    state: State
    weights: dict[str, Tensor]


class DamagedSnapshot(UserError):
    """A file of a snapshot is missing or is not what was written."""


# Writing.


def save_snapshot(
    out: Path, state: State, weights: dict[str, Tensor], config: dict[str, Any], *, keep: int
) -> Path:
    """Write the snapshot and return its folder; an existing one of the same step is kept.

    All but the ``keep - 1`` newest snapshots are deleted before, so that there is never more than ``keep``
    on the disk. The last one is deleted only after the new one is complete, with ``keep=1``.
    """
    folder = out / SNAPSHOTS / f"epoch_{state.epoch:04d}_step_{state.step:08d}"
    if folder.exists():
        return folder

    def fill(temporary: Path) -> None:
        write_weights(temporary / WEIGHTS, weights)
        write_config(temporary / CONFIG, config)
        torch.save(vars(state), temporary / STATE)
        write_config(temporary / DIGESTS, {name: _digest(temporary / name) for name in CONTENT})

    _remove_old_snapshots(out, keep=max(keep - 1, 1))
    write_folder(folder, fill)
    _remove_old_snapshots(out, keep=keep)
    return folder


def _remove_old_snapshots(out: Path, *, keep: int) -> None:
    """Delete all but the ``keep`` newest snapshots, if the newest one is intact."""
    snapshots = list_snapshots(out)
    if len(snapshots) <= keep:
        return
    try:
        verify(snapshots[-1])
    except DamagedSnapshot as error:
        logger.warning("%s; older snapshots are kept", error)
        return
    for path in snapshots[:-keep]:
        remove_folder(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Reading.


def list_snapshots(out: Path) -> list[Path]:
    """Return the complete snapshots of a run, newest last."""
    folder = out / SNAPSHOTS
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=_position)


def _position(path: Path) -> tuple[int, int]:
    _, epoch, _, step = path.name.split("_")
    return int(epoch), int(step)


def load_newest(out: Path) -> Snapshot | None:
    """Load the newest snapshot that is intact; None if there are no snapshots. Changes nothing.

    Damaged ones after it are named in warnings. If all are damaged, :class:`UserError` is raised.
    """
    problems: list[DamagedSnapshot] = []
    for folder in reversed(list_snapshots(out)):
        try:
            loaded = Snapshot(folder, *load_snapshot(folder))
        except DamagedSnapshot as error:
            problems.append(error)
            continue
        for problem in problems:
            logger.warning("%s; resuming from the snapshot before it, %s", problem, folder.name)
        return loaded
    if problems:
        raise UserError(f"{problems[0]}, and no other snapshot is intact; start again with --overwrite")
    return None


def set_aside_after(out: Path, snapshot: Path) -> None:
    """Rename the snapshots after this one, which are damaged, so that the run does not count on them."""
    snapshots = list_snapshots(out)
    for damaged in snapshots[snapshots.index(snapshot) + 1 :]:
        aside = damaged.with_name(damaged.name + DAMAGED)
        if aside.exists():
            remove_folder(aside)
        os.rename(damaged, aside)


def load_snapshot(folder: Path) -> tuple[State, dict[str, Tensor]]:
    """Return the state and the weights to evaluate, or raise :class:`DamagedSnapshot`.

    Runs no pickled code.
    """
    verify(folder)
    path = folder / STATE
    try:
        read_config(folder)
        weights = read_weights(folder)
    except UserError as error:
        raise DamagedSnapshot(str(error)) from error
    try:
        state = as_dataclass(State, torch.load(path, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:
        raise DamagedSnapshot(f"{path} holds pickled code, which is never run") from error
    # What torch raises for a damaged file of an older snapshot, which has no digests.
    except (OSError, RuntimeError, EOFError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise DamagedSnapshot(f"{path} is damaged: it cannot be read") from error
    return state, weights


def verify(folder: Path, names: Sequence[str] = CONTENT) -> None:
    """Raise :class:`DamagedSnapshot` if one of the files differs from its digest.

    Older snapshots have no digests and are not verified.
    """
    path = folder / DIGESTS
    if not path.exists():
        return
    try:
        digests = read_json(path)
    except UserError as error:
        raise DamagedSnapshot(f"{path} is damaged: {error}") from error
    if set(digests) != set(CONTENT):
        raise DamagedSnapshot(f"{path} is damaged: it does not list {', '.join(CONTENT)}")
    for name in names:
        try:
            intact = _digest(folder / name) == digests[name]
        except OSError as error:
            raise DamagedSnapshot(f"{folder / name} cannot be read: {error.strerror}") from error
        if not intact:
            raise DamagedSnapshot(f"{folder / name} is damaged: its SHA-256 is not that in {DIGESTS}")
