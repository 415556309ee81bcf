"""Logs of a run: its header, JSON lines, and TensorBoard, trackio or wandb if configured."""

from __future__ import annotations

import json
import logging
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from visualtokens.errors import UserError
from visualtokens.files import json_ready, write_atomically
from visualtokens.progress import count, hardware, header, model_name, parameters
from visualtokens.tasks.task import Training
from visualtokens.train.config import TrainConfig

logger = logging.getLogger(__name__)
LOG = "log.jsonl"  # one line per epoch
STEPS = "steps.jsonl"  # one line every few steps
RUN_ID = "run_id"
TENSORBOARD = "tensorboard"  # folder of its event files
PROJECT = "visualtokens"
SLOW_BF16 = ("NO AVX", "AVX2")  # a training step of VT-ResNet-18 takes 11 times as long as in float32


def log_header(config: TrainConfig, training: Training[Any], device: torch.device, *, processes: int) -> None:
    """Log what is trained, on which data and hardware, and where the output goes."""
    named = model_name(config.model, config.model_args)
    size = training.task.input_size(training.model, training.preprocess)
    train_images, val_images = training.images
    rows = {
        "model": f"{named}, {parameters(training.model)}, input {size}",
        "task": f"{config.task}, {count(len(training.classes), 'class')}",
        "data": f"{config.data}, {train_images:,} training and {val_images:,} validation images",
        "device": hardware(device, processes=processes, workers=config.workers),
        "seed": str(config.seed),
        "output": config.out,
    }
    header(rows, shown=True)
    if config.bf16 and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in SLOW_BF16:
        logger.warning(
            "this processor has no fast bfloat16: training with --bf16 can be ten times as slow; leave it out"
        )


class Sink(Protocol):
    """A logger."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Log:
    """The log of the main process; the others have none."""

    def __init__(self, out: Path, *, sinks: Sequence[Sink] = ()) -> None:
        self.out = out
        self.sinks = sinks
        self._steps = (out / STEPS).open("a", encoding="utf-8")

    def step(self, record: Mapping[str, Any]) -> None:
        """Append the record of a step to ``steps.jsonl``; it holds the number of the step as ``step``."""
        self._steps.write(json.dumps(json_ready(record)) + "\n")
        self._steps.flush()
        self._send("train", record, record["step"])

    def epoch(self, history: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Write the records of all epochs; the last one is new."""
        write_history(self.out, history)
        self._send("epoch", history[-1], step)

    def _send(self, group: str, record: Mapping[str, Any], step: int) -> None:
        values = {f"{group}/{name}": value for name, value in record.items() if _is_number(value)}
        for sink in self.sinks:
            sink.log(values, step)

    def close(self) -> None:
        self._steps.close()
        for sink in self.sinks:
            sink.close()


def write_history(out: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """``log.jsonl``: one JSON object per epoch."""
    lines = "".join(json.dumps(json_ready(record)) + "\n" for record in history)
    write_atomically(out / LOG, lambda path: path.write_text(lines, encoding="utf-8"))


def forget_steps_after(out: Path, step: int) -> None:
    """Remove the records after ``step``, from which the run resumes, and incomplete or damaged lines."""
    path = out / STEPS
    if not path.exists():
        return
    kept = [line for line in path.read_bytes().splitlines(True) if _step_of(line) <= step]
    write_atomically(path, lambda temporary: temporary.write_bytes(b"".join(kept)))


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, LookupError, TypeError):
        return math.inf


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def open_sinks(names: Sequence[str], out: Path, *, options: Mapping[str, Any], step: int) -> list[Sink]:
    """Open the configured loggers; the run starts or resumes at ``step``."""
    openers: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: _TensorBoard(out, step),
        "trackio": lambda: _Tracker("trackio", out, options),
        "wandb": lambda: _Tracker("wandb", out, options),
    }
    return [openers[name]() for name in names]


class _TensorBoard:
    """TensorBoard event files in the folder ``tensorboard`` of the run."""

    def __init__(self, out: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._writer = SummaryWriter(str(out / TENSORBOARD), purge_step=step + 1 if step else None)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Tracker:
    """trackio or wandb, which share an interface. A resumed run keeps its id."""

    def __init__(self, name: str, out: Path, options: Mapping[str, Any]) -> None:
        self._library = _import(name)
        run = _run_id(out)
        settings: dict[str, Any] = dict(project=PROJECT, config=dict(options), resume="allow")
        if name == "wandb":
            self._library.init(id=run, name=out.name, dir=str(out), **settings)
        else:
            self._library.init(name=f"{out.name}-{run}", **settings)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._library.log(dict(values), step=step)

    def close(self) -> None:
        self._library.finish()


def _run_id(out: Path) -> str:
    path = out / RUN_ID
    if not path.exists():
        write_atomically(path, lambda temporary: temporary.write_text(uuid.uuid4().hex[:8]))
    return path.read_text()


def _import(name: str) -> ModuleType:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _missing(name) from error


def _missing(name: str) -> UserError:
    return UserError(f"log={name} needs a library that is not installed: pip install 'visualtokens[logging]'")
