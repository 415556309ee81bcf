"""Snapshots, from which a run resumes bit for bit, and the output folder that holds them.

A snapshot is a folder such as ``snapshots/epoch_0002_step_00000140``, which gets this name when it is
complete: the model to evaluate in the Hub's layout, and ``state.pt`` with the rest.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visualtokens.errors import UserError
from visualtokens.files import (
    CONFIG,
    WEIGHTS,
    link,
    read_config,
    read_weights,
    remove_folder,
    remove_leftovers,
    saving,
    write_atomically,
    write_config,
    write_folder,
    write_weights,
)
from visualtokens.train.config import TrainConfig
from visualtokens.train.distributed import restarts
from visualtokens.train.log import LOG, RUN_ID, STEPS, forget_steps_after

SNAPSHOTS = "snapshots"
STATE = "state.pt"
_NAME = re.compile(r"epoch_\d{4,}_step_\d{8,}")


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


def save_snapshot(out: Path, state: State, weights: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """Write the snapshot and return its folder; an existing one of the same step is kept."""
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
    """Return the complete snapshots of a run, newest last."""
    folder = out / SNAPSHOTS
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=_position)


def _position(path: Path) -> tuple[int, int]:
    _, epoch, _, step = path.name.split("_")
    return int(epoch), int(step)


def remove_old_snapshots(out: Path, *, keep: int) -> None:
    """Delete all but the ``keep`` newest snapshots."""
    for path in list_snapshots(out)[:-keep]:
        remove_folder(path)


def load_snapshot(folder: Path) -> tuple[State, dict[str, Tensor]]:
    """Return the state and the weights to evaluate. Runs no pickled code."""
    path = folder / STATE
    try:
        state = State(**torch.load(path, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} holds pickled code, which is never run, so the run cannot resume from it; "
            f"delete {str(folder)!r} to resume from the snapshot before it, or give --overwrite"
        ) from error
    except (RuntimeError, EOFError, TypeError, OSError) as error:
        raise UserError(
            f"{path} cannot be read, so the run cannot resume from it; "
            f"delete {str(folder)!r} to resume from the snapshot before it, or give --overwrite"
        ) from error
    return state, read_weights(folder)


# The output folder.

BEST = "best"
OPTIONS = "options.json"
FILES = (OPTIONS, CONFIG, WEIGHTS, LOG, STEPS, RUN_ID)
FOLDERS = (SNAPSHOTS, BEST, "tensorboard")
# Options that may change when a run resumes; more epochs stretch the learning rate schedule.
MAY_CHANGE = (
    *("out", "overwrite", "resume", "epochs", "workers", "device", "accumulate", "compile", "save_every"),
    *("keep", "max_bad_steps", "max_bad_images", "log", "log_every"),
)


def open_run(config: TrainConfig) -> Path | None:
    """Prepare the output folder; return the snapshot to resume from, None for a new run.

    A folder that holds a run is refused without ``resume`` or ``overwrite``. A job restarted by torchrun
    resumes.
    """
    out = Path(config.out)
    if out.exists() and not out.is_dir():
        raise UserError(f"out={config.out!r} is a file; give a folder")
    holds_run = any((out / name).exists() for name in (*FILES, SNAPSHOTS))
    resume: bool | str = "auto" if restarts() > 0 else config.resume
    if resume is True and not holds_run:
        raise UserError(f"nothing to resume: {config.out!r} holds no run; leave --resume out")
    if resume and holds_run:
        _require_same(config)
        with saving(out, "nothing was changed"):
            remove_leftovers(out)
            remove_leftovers(out / SNAPSHOTS)
            _write_options(config)
            snapshots = list_snapshots(out)
            if not snapshots:  # killed before the first one
                forget_steps_after(out, 0)
        return snapshots[-1] if snapshots else None
    if holds_run and not config.overwrite and not resume:
        raise UserError(f"{config.out!r} already holds a run; give --resume, --overwrite or another --out")
    with saving(out, "nothing was changed"):
        out.mkdir(parents=True, exist_ok=True)
        _clear(out)
        _write_options(config)
    return None


def _clear(out: Path) -> None:
    for name in FILES:
        (out / name).unlink(missing_ok=True)
    for name in FOLDERS:
        if (out / name).is_dir():
            shutil.rmtree(out / name)
    remove_leftovers(out)


def _write_options(config: TrainConfig) -> None:
    text = json.dumps(asdict(config), indent=2)
    write_atomically(Path(config.out) / OPTIONS, lambda path: path.write_text(text, encoding="utf-8"))


def _require_same(config: TrainConfig) -> None:
    before = _options_before(Path(config.out))
    now = json.loads(json.dumps(asdict(config)))  # tuples become lists, as in the file
    for name, value in now.items():
        was = before.get(name, config.default(name))
        if name not in MAY_CHANGE and was != value:
            raise UserError(
                f"the run in {config.out!r} has {name}={was!r}, not {value!r}; "
                "resume it with the same options, or start again with --overwrite"
            )


def _options_before(out: Path) -> dict[str, Any]:
    try:
        options = json.loads((out / OPTIONS).read_text(encoding="utf-8"))
    except FileNotFoundError:  # the folder was moved or made by hand
        options = read_config(out).get("training", {})
    except ValueError as error:
        raise UserError(f"{out / OPTIONS} is not JSON: {error}; start again with --overwrite") from error
    return dict(options)


def publish(out: Path, snapshot: Path, *, best: bool) -> None:
    """Link the snapshot's model into the output folder, and into its ``best`` folder if it is the best."""
    folders = [out, out / BEST] if best else [out]
    for folder in folders:
        folder.mkdir(exist_ok=True)
        for name in (CONFIG, WEIGHTS):
            link(snapshot / name, folder / name)
