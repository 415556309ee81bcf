"""The folder of a run: whose it is, and what is in it."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from visualtokens.errors import UserError
from visualtokens.train.checkpoint import CONFIG, WEIGHTS, read_config
from visualtokens.train.config import TrainConfig
from visualtokens.train.config_checks import default_of
from visualtokens.train.distributed import restarts
from visualtokens.train.files import explain_failure, link, remove_leftovers, write_atomically
from visualtokens.train.log import LOG, RUN_ID, STEPS, forget_steps_after
from visualtokens.train.snapshot import SNAPSHOTS, list_snapshots

BEST = "best"
OPTIONS = "options.json"
FILES = (OPTIONS, CONFIG, WEIGHTS, LOG, STEPS, RUN_ID)
FOLDERS = (SNAPSHOTS, BEST, "tensorboard")
# A resumed run may differ in these; more epochs stretch the schedule of the learning rate.
MAY_CHANGE = (
    *("out", "overwrite", "resume", "epochs", "workers", "device", "accumulate", "compile", "save_every"),
    *("keep", "max_bad_steps", "max_bad_images", "log", "log_every"),
)


def open_run(config: TrainConfig) -> Path | None:
    """Make the folder ready. Gives the snapshot to resume from, None for a run that starts.

    A folder that holds a run is refused unless the configuration says what to do with it. A job that
    torchrun starts again resumes what it had begun.
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
        with explain_failure(out, "nothing was changed"):
            remove_leftovers(out)
            remove_leftovers(out / SNAPSHOTS)
            _write_options(config)
            snapshots = list_snapshots(out)
            if not snapshots:  # it was killed before the first one
                forget_steps_after(out, 0)
        return snapshots[-1] if snapshots else None
    if holds_run and not config.overwrite and not resume:
        raise UserError(f"{config.out!r} already holds a run; give --resume, --overwrite or another --out")
    with explain_failure(out, "nothing was changed"):
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
    now = json.loads(json.dumps(asdict(config)))  # as it reads after a round trip through the file
    for name, value in now.items():
        was = before.get(name, default_of(config, name))
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
    """Make a snapshot's model that of the run, and perhaps the best one of the run."""
    folders = [out, out / BEST] if best else [out]
    for folder in folders:
        folder.mkdir(exist_ok=True)
        for name in (CONFIG, WEIGHTS):
            link(snapshot / name, folder / name)
