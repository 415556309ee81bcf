"""Helpers of the training tests."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from visualtokens.data import Batch
from visualtokens.tasks.classify import ClassifyEvaluation, evaluate, loss_of
from visualtokens.tasks.task import ExampleLoader, Loading, Loss, Training, get_task
from visualtokens.train import TrainConfig
from visualtokens.train.snapshot import State, list_snapshots, load_snapshot
from visualtokens.train.step import Learner, StepResult

Make = Callable[..., TrainConfig]
CPU = torch.device("cpu")


class StubTraining(Training[Batch]):
    """Any model with ten classes; the loss is a smoothed cross-entropy."""

    def __init__(self, model: nn.Module, *, smoothing: float = 0.0) -> None:
        self.task, self.model = get_task("classify"), model
        self.smoothing = smoothing

    def train_loader(self, loading: Loading) -> ExampleLoader[Batch]:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch, *, rng: np.random.Generator) -> Loss:
        logits = model(batch.images)
        right = (logits.argmax(1) == batch.labels).sum()
        return Loss(loss_of(logits, batch.labels, smoothing=self.smoothing), {"accuracy": right})

    def evaluate(
        self, model: nn.Module, batches: Iterable[Batch], *, progress: bool | None
    ) -> ClassifyEvaluation:
        return evaluate(model, batches, classes=10, progress=progress)

    def describe(self) -> dict[str, Any]:
        return {}


def a_batch(images: Tensor, labels: Tensor | None = None) -> Batch:
    count = torch.arange(len(images))
    return Batch(images, count % 10 if labels is None else labels, count, ())


def learner_of(
    model: nn.Module, config: TrainConfig, *, steps: int = 4, smoothing: float = 0.0
) -> Learner[Batch]:
    return Learner(StubTraining(model, smoothing=smoothing), config, device=CPU, steps=steps)


def weights(config: TrainConfig, folder: str = ".") -> dict[str, Tensor]:
    return load_file(Path(config.out) / folder / "model.safetensors")


def same(a: Any, b: Any) -> bool:
    """Return whether two nested structures are equal bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def lines(config: TrainConfig, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.out) / name).read_text().splitlines()]


def history(config: TrainConfig) -> list[dict[str, Any]]:
    return lines(config, "log.jsonl")


def step_losses(config: TrainConfig) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in lines(config, "steps.jsonl")]


def last_state(config: TrainConfig) -> tuple[State, dict[str, Tensor]]:
    return load_snapshot(list_snapshots(Path(config.out))[-1])


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file; other hard links to it keep the old content."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.unlink()
    path.write_bytes(content)


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """Call ``act`` during the given step, counted from 0."""
    learn = Learner.learn

    def learn_and_act(self: Learner[Batch], batch: Batch, counts: Sequence[int] | None = None) -> StepResult:
        if self.step == step:
            act()
        return learn(self, batch, counts)

    monkeypatch.setattr(Learner, "learn", learn_and_act)


@contextmanager
def dies_at_evaluation(task: type, number: int) -> Iterator[None]:
    """Let the training inside fail at its evaluation of this number, counted from 1."""

    class Enough(Exception): ...

    original, calls = task.evaluate, 0  # type: ignore[attr-defined]

    def evaluate(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise Enough
        return original(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "evaluate", evaluate)
        with pytest.raises(Enough):
            yield


def signal_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGINT) -> None:
    """Send this process a signal during the given step."""
    at_step(monkeypatch, step, lambda: os.kill(os.getpid(), number))
