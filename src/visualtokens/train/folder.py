"""The folder of a run: whose it is, and its log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from visualtokens.errors import UserError
from visualtokens.train.checkpoint import CONFIG, WEIGHTS, read_config
from visualtokens.train.config import TrainConfig
from visualtokens.train.files import write_atomically
from visualtokens.train.state import STATE, State, load_state

LOG = "log.jsonl"
FILES = (CONFIG, WEIGHTS, STATE, LOG)
# A resumed run may differ in these; more epochs stretch the schedule of the learning rate.
_MAY_CHANGE = ("out", "overwrite", "resume", "epochs", "workers", "device")


def open_run(config: TrainConfig) -> State | None:
    """Make the folder ready. Gives the state to resume from, None for a run that starts.

    A folder that holds a run is refused unless the configuration says what to do with it.
    """
    out = Path(config.out)
    if out.exists() and not out.is_dir():
        raise UserError(f"out={config.out!r} is a file; give a folder")
    holds_run = any((out / name).exists() for name in FILES)
    if config.resume:
        if not holds_run:
            raise UserError(f"nothing to resume: {config.out!r} holds no run; leave --resume out")
        _require_same(config, read_config(out).get("training", {}))
        return load_state(out)
    if holds_run and not config.overwrite:
        raise UserError(f"{config.out!r} already holds a run; give --resume, --overwrite or another --out")
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (out / name).unlink(missing_ok=True)
    return None


def _require_same(config: TrainConfig, before: dict[str, Any]) -> None:
    now = json.loads(json.dumps(asdict(config)))  # as it reads after a round trip through config.json
    for name, value in now.items():
        if name not in _MAY_CHANGE and before.get(name) != value:
            raise UserError(
                f"the run in {config.out!r} has {name}={before.get(name)!r}, not {value!r}; "
                "resume it with the same options, or start again with --overwrite"
            )


def write_log(out: Path, history: Sequence[dict[str, Any]]) -> None:
    """``log.jsonl``: one JSON object per epoch."""
    lines = "".join(json.dumps(record) + "\n" for record in history)
    write_atomically(out / LOG, lambda path: path.write_text(lines, encoding="utf-8"))
