"""The training run, from a configuration to a checkpoint."""

from __future__ import annotations

import time
from typing import Any

from visualtokens.train.config import TrainConfig
from visualtokens.train.device import pick_device
from visualtokens.train.distributed import Team, join_team, local_device
from visualtokens.train.result import TrainResult
from visualtokens.train.run import Run
from visualtokens.train.signals import Stop, catch_signals


def train(config: TrainConfig, *, progress: bool | None = None) -> TrainResult:
    """Train a model as the configuration says and leave it in ``config.out``.

    Saves after every epoch, and more often if asked to. SIGINT and SIGTERM end the run after the current
    step with all of it saved; the result then tells the signal. ``progress`` shows a bar; None shows it on
    a terminal only. Seeds torch's global generator. Started by torchrun, several processes train together.
    """
    began = time.perf_counter()
    device = local_device(pick_device(config.device))
    with join_team(device) as team:
        run = Run(config, device=device, team=team, progress=progress)
        with catch_signals() as stop:
            evaluation = run.go(stop)
    return _result(run, evaluation, team, stop, seconds=time.perf_counter() - began)


def _result(run: Run, evaluation: Any, team: Team, stop: Stop, *, seconds: float) -> TrainResult:
    return TrainResult(
        out=run.config.out,
        classes=run.task.classes,
        history=run.history,
        score=run.task.score,
        evaluation=evaluation,
        seconds=seconds,
        images_per_second=run.total.images_per_second,
        data_wait=run.total.data_wait,
        unreadable=run.bad_train.images + run.bad_val.images,
        skipped=run.learner.skipped,
        leads=team.leads,
        signal=stop.signal,
    )
