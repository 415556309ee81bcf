"""The output folder of a run: opening it for one run at a time, and deleting only what a run wrote.

``options.json`` marks a folder that holds a run. It is written before everything else and never deleted;
``--overwrite`` replaces it after the rest of the old run is gone.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from visualtokens.errors import UserError
from visualtokens.files import (
    CONFIG,
    WEIGHTS,
    link,
    read_json,
    remove_folder,
    remove_leftovers,
    saving,
    write_atomically,
    write_config,
)
from visualtokens.processes import restarts
from visualtokens.train.config import TrainConfig
from visualtokens.train.fingerprint import Fingerprint, difference
from visualtokens.train.lock import lock
from visualtokens.train.log import LOG, RUN_ID, STEPS, TENSORBOARD, forget_steps_after
from visualtokens.train.snapshot import (
    DAMAGED,
    NAME,
    SNAPSHOTS,
    DamagedSnapshot,
    Snapshot,
    list_snapshots,
    load_newest,
    set_aside_after,
    verify,
)

BEST = "best"
OPTIONS = "options.json"
# What a run writes into its folders besides the marker; "" is the output folder itself.
WRITTEN = {
    "": re.compile("|".join(map(re.escape, (CONFIG, WEIGHTS, LOG, STEPS, RUN_ID)))),
    SNAPSHOTS: re.compile(f"{NAME.pattern}({re.escape(DAMAGED)})?"),
    BEST: re.compile("|".join(map(re.escape, (CONFIG, WEIGHTS)))),
    TENSORBOARD: re.compile(r"events\.out\.tfevents\..+"),
}
# Options that may change when a run resumes; more epochs stretch the learning rate schedule.
MAY_CHANGE = (
    *("out", "overwrite", "resume", "epochs", "workers", "device", "accumulate", "compile", "save_every"),
    *("keep", "max_bad_steps", "max_bad_images", "log", "log_every"),
)


@contextlib.contextmanager
def open_run(config: TrainConfig, data: Fingerprint) -> Iterator[Snapshot | None]:
    """Lock and prepare the output folder; yield the snapshot to resume from, None for a new run.

    A folder that holds a run is refused without ``resume`` or ``overwrite``, and while another run uses it.
    A job restarted by torchrun resumes.
    """
    out = Path(config.out)
    if out.exists() and not out.is_dir():
        raise UserError(f"out={config.out!r} is a file; give a folder")
    resume = _resumes(config)
    if resume is True and not (out / OPTIONS).exists():
        raise UserError(f"nothing to resume: {config.out!r} holds no run; leave --resume out")
    with saving(out, "nothing was changed"):
        out.mkdir(parents=True, exist_ok=True)
    with lock(out):
        before = read_options(out)
        if before is None:
            _refuse_foreign(out)
        elif resume:
            yield _resume(config, before, data)
            return
        elif not config.overwrite:
            raise UserError(
                f"{config.out!r} already holds a run; give --resume, --overwrite or another --out"
            )
        with saving(out, "nothing was changed"):
            _clear(out)
            _write_options(config)
        yield None


def _resumes(config: TrainConfig) -> bool | str:
    return "auto" if restarts() > 0 else config.resume


def snapshot_to_resume(config: TrainConfig) -> Path | None:
    """Return the newest intact snapshot if the run resumes from one; changes nothing.

    Options that must not change but do raise :class:`UserError`.
    """
    out = Path(config.out)
    before = read_options(out) if _resumes(config) and out.is_dir() else None
    if before is None:
        return None
    _refuse_changes(config, before)
    for folder in reversed(list_snapshots(out)):
        with contextlib.suppress(DamagedSnapshot):
            verify(folder)
            if (folder / CONFIG).is_file():  # another process may just have set it aside
                return folder
    return None


def read_options(out: Path) -> dict[str, Any] | None:
    """Return the options of the run in the folder; None if it holds no run."""
    path = out / OPTIONS
    if not path.exists():
        return None
    way_out = "restore it, move the folder away, or give another --out"
    try:
        options = read_json(path)
    except UserError as error:
        raise UserError(f"{error}; {way_out}") from error
    if not {"model", "data", "out"} <= options.keys():
        raise UserError(f"{path} does not hold the options of a run; {way_out}")
    return options


def changed_option(config: TrainConfig, before: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first option that must not change when a run resumes but does: name, old and new value."""
    now = json.loads(json.dumps(config.filled()))  # tuples become lists, as in the file
    for name, value in now.items():
        was = before.get(name, config.default(name))
        if name not in MAY_CHANGE and was != value:
            return name, was, value
    return None


def _refuse_changes(config: TrainConfig, before: Mapping[str, Any]) -> None:
    if changed := changed_option(config, before):
        name, was, value = changed
        raise UserError(
            f"the run in {config.out!r} has {name}={was!r}, not {value!r}; "
            "resume it with the same options, or start again with --overwrite"
        )


def _resume(config: TrainConfig, before: Mapping[str, Any], data: Fingerprint) -> Snapshot | None:
    """Load the snapshot to resume from, None if the run has none; writes only if nothing forbids it."""
    out = Path(config.out)
    _refuse_changes(config, before)
    snapshot = load_newest(out)
    if snapshot is not None and snapshot.state.data is not None:
        problem = difference(data, snapshot.state.data)
        if problem is not None:
            raise UserError(
                f"the data of the run in {config.out!r} changed: {problem}; "
                "restore the data, or start again with --overwrite"
            )
    with saving(out, "nothing was changed"):
        for name in WRITTEN:
            remove_leftovers(out / name)
        _write_options(config)
        if snapshot is None:  # killed before the first one
            forget_steps_after(out, 0)
        else:
            set_aside_after(out, snapshot.path)
    return snapshot


def _refuse_foreign(out: Path) -> None:
    """Raise :class:`UserError` if the folder holds something under a name that a run uses."""
    for path in sorted(out.iterdir()):
        own = path.name in WRITTEN or WRITTEN[""].fullmatch(path.name)
        if own and not (path.is_dir() and not any(path.iterdir())):
            raise UserError(
                f"{path} is not part of a run ({out} has no {OPTIONS}), so it is not replaced; "
                "move it away, or give another --out"
            )


def _clear(out: Path) -> None:
    """Delete the files of the old run but its marker; other files stay."""
    for name, written in WRITTEN.items():
        folder = out / name
        if not folder.is_dir():
            continue
        remove_leftovers(folder)
        for path in list(folder.iterdir()):
            if written.fullmatch(path.name) and path.is_dir() == (name == SNAPSHOTS):
                remove_folder(path) if path.is_dir() else path.unlink()
        if name and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()


def _write_options(config: TrainConfig) -> None:
    write_atomically(Path(config.out) / OPTIONS, lambda path: write_config(path, config.filled()))


def publish(out: Path, snapshot: Path, *, best: bool) -> None:
    """Link the snapshot's model into the output folder, and into its ``best`` folder if it is the best.

    A damaged model is not published.
    """
    verify(snapshot, (CONFIG, WEIGHTS))
    folders = [out, out / BEST] if best else [out]
    for folder in folders:
        folder.mkdir(exist_ok=True)
        for name in (CONFIG, WEIGHTS):
            link(snapshot / name, folder / name)
