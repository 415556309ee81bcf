"""Logs: JSON lines, TensorBoard and trackers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.train.helpers import Make, lines, signal_at
from visualtokens.errors import UserError
from visualtokens.tasks.task import open_training
from visualtokens.train import train
from visualtokens.train.log import Log, forget_steps_after, log_header, open_sinks


def test_steps_are_flushed_at_once(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.step({"step": 1, "loss": 2.5})
    log.step({"step": 2, "loss": float("nan")})
    logged = (tmp_path / "steps.jsonl").read_text()
    assert [json.loads(line) for line in logged.splitlines()] == [
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": None},
    ]
    log.close()


def test_records_after_a_snapshot_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    forget_steps_after(tmp_path, 3)
    assert not path.exists()
    good, bad = [b'{"step": 1}', b'{"step": 3}', b'{"step": 4}'], [b"no json", b'{"st\xe5p": 2}', b"2"]
    path.write_bytes(b"\n".join([*good, *bad, b'{"step": 2']))
    forget_steps_after(tmp_path, 3)
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'


@pytest.mark.parametrize(("capability", "warns"), [("AVX2", True), ("AVX512", False), ("SVE256", False)])
def test_bf16_on_a_processor_without_it_is_warned_about(
    config: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: str,
    warns: bool,
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    settings = config(bf16=True)
    training = open_training(settings)
    log_header(settings, training, torch.device("cpu"), processes=1)
    assert ("no fast bfloat16" in caplog.text) == warns
    caplog.clear()
    log_header(config(bf16=False), training, torch.device("cpu"), processes=1)
    assert "bfloat16" not in caplog.text


class Recorder(ModuleType):
    """Replaces trackio or wandb."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, Any]] = []

    def init(self, **options: Any) -> None:
        self.calls.append(("init", options))

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append(("log", (values, step)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_trackers_log_steps_and_epochs_and_keep_their_id(
    config: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, tracker := Recorder(name))
    with monkeypatch.context() as patch:
        signal_at(patch, 3)
        train(config(log=[name], log_every=1))
    train(config(log=[name], log_every=1, resume="auto"))
    starts = [options for call, options in tracker.calls if call == "init"]
    key = "id" if name == "wandb" else "name"
    assert starts[0][key] == starts[1][key]
    assert starts[0]["resume"] == "allow"
    assert starts[0]["config"]["model"] == "paca_vit_nano"
    logged = [values for call, values in tracker.calls if call == "log"]
    steps = [(step, values["train/loss"]) for values, step in logged if "train/loss" in values]
    assert steps == [(record["step"], record["loss"]) for record in lines(config(), "steps.jsonl")]
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5, 6]
    epochs = [
        (step, values["epoch/val_accuracy"]) for values, step in logged if "epoch/val_accuracy" in values
    ]
    assert epochs == [(3 * r["epoch"], r["val_accuracy"]) for r in lines(config(), "log.jsonl")]
    assert [call for call, _ in tracker.calls].count("finish") == 2


def test_tensorboard(config: Make) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(config(log=["tensorboard"], log_every=2))
    events = EventAccumulator(str(Path(config().out) / "tensorboard")).Reload()
    logged = lines(config(), "steps.jsonl")
    assert [event.step for event in events.Scalars("train/loss")] == [record["step"] for record in logged]
    losses = [event.value for event in events.Scalars("train/loss")]
    assert losses == pytest.approx([record["loss"] for record in logged])
    assert [event.step for event in events.Scalars("epoch/val_accuracy")] == [3, 6]


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    missing = "torch.utils.tensorboard" if name == "tensorboard" else name
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=rf"log={name} needs .*pip install 'visualtokens\[logging\]'"):
        open_sinks([name], tmp_path, options={}, step=0)
