"""Snapshots: all that a run needs to go on as if nothing had happened.

A snapshot is a folder ``snapshots/epoch_0002_step_00000140`` that appears under this name when it is whole:
the model to use in the Hub's layout, and ``state.pt`` with the rest. The newest name is the last one.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visualtokens.errors import UserError
from visualtokens.train.checkpoint import CONFIG, WEIGHTS, read_weights, write_config, write_weights
from visualtokens.train.files import remove_folder, write_folder

SNAPSHOTS = "snapshots"
STATE = "state.pt"
_NAME = re.compile(r"epoch_\d{4,}_step_\d{8,}")


@dataclass(frozen=True)
class State:
    """A run between two steps, besides the weights to use."""

    epoch: int  # whole epochs done, the judgement included
    offset: int  # steps done of the epoch after those
    step: int  # steps done in all, which is what the schedule and the random numbers depend on
    optimizer: dict[str, Any]
    trained: dict[str, Tensor] | None  # the weights that are trained, if those to use are their average
    history: list[dict[str, Any]]  # one record per whole epoch
    stats: dict[str, Any]  # of the epoch so far
    skipped: int  # steps that were skipped because something was not finite
    skipped_in_a_row: int
    unreadable: dict[str, list[tuple[str, str]]]  # path and reason, of the training and validation images


def save_snapshot(out: Path, state: State, weights: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """Write the snapshot and give its folder. One of the same position holds the same, and is kept."""
    folder = out / SNAPSHOTS / f"epoch_{state.epoch:04d}_step_{state.step:08d}"
    if folder.exists():
        return folder

    def fill(temporary: Path) -> None:
        write_weights(temporary / WEIGHTS, weights)
        write_config(temporary / CONFIG, config)
        torch.save(vars(state), temporary / STATE)

    write_folder(folder, fill)
    return folder


def list_snapshots(out: Path) -> list[Path]:
    """The whole snapshots of a run, the newest one last."""
    folder = out / SNAPSHOTS
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=_position)


def _position(path: Path) -> tuple[int, int]:
    _, epoch, _, step = path.name.split("_")
    return int(epoch), int(step)


def remove_old_snapshots(out: Path, *, keep: int) -> None:
    """Delete all but the newest ones."""
    for path in list_snapshots(out)[:-keep]:
        remove_folder(path)


def load_snapshot(folder: Path) -> tuple[State, dict[str, Tensor]]:
    """The state and the weights to use. Runs no pickled code."""
    path = folder / STATE
    try:
        state = State(**torch.load(path, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} holds pickled code, which is not run, so the run cannot resume from it; "
            f"delete {str(folder)!r} to go on from the snapshot before it, or give --overwrite"
        ) from error
    except (RuntimeError, EOFError, TypeError, OSError) as error:
        raise UserError(
            f"{path} cannot be read, so the run cannot resume from it; "
            f"delete {str(folder)!r} to go on from the snapshot before it, or give --overwrite"
        ) from error
    return state, read_weights(folder)
