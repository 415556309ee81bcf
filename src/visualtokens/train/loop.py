"""The training run, from a configuration to a checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visualtokens.data import BadImages, Batch, create_loader, open_dataset
from visualtokens.errors import UserError
from visualtokens.tasks.classify import Evaluation, evaluate
from visualtokens.train.build import build_model, preprocess_for, sized_args
from visualtokens.train.checkpoint import plain_weights, save_checkpoint
from visualtokens.train.config import TrainConfig
from visualtokens.train.device import pick_device
from visualtokens.train.epoch import EpochStats, train_epoch
from visualtokens.train.folder import open_run, write_log
from visualtokens.train.result import TrainResult
from visualtokens.train.signals import Stop, Stopped, catch_signals
from visualtokens.train.state import State, save_state
from visualtokens.train.step import Learner

logger = logging.getLogger(__name__)


def train(config: TrainConfig, *, progress: bool | None = None) -> TrainResult:
    """Train a model as the configuration says and leave it in ``config.out``.

    Saves after every epoch. SIGINT and SIGTERM end the run after the current step with the model saved;
    the result then tells the signal. ``progress`` shows a bar; None shows it on a terminal only.
    Seeds torch's global generator.
    """
    began = time.perf_counter()
    run = _Run(config, progress=progress)
    with catch_signals() as stop:
        run.open()
        evaluation = run.epochs(stop)
    return TrainResult(
        out=config.out,
        classes=run.classes,
        history=run.history,
        accuracy=evaluation.accuracy if evaluation else None,
        confusion=evaluation.confusion if evaluation else None,
        seconds=time.perf_counter() - began,
        images_per_second=run.images / max(run.train_seconds, 1e-9),
        unreadable=run.bad_train.images + run.bad_val.images,
        signal=stop.signal,
    )


class _Run:
    """Everything one run holds. Making it checks all that the configuration names and writes nothing."""

    def __init__(self, config: TrainConfig, *, progress: bool | None) -> None:
        self.config = config
        self.progress = progress
        device = pick_device(config.device)
        train_set, val_set = open_dataset(config.data, "train"), open_dataset(config.data, "val")
        self.classes = train_set.classes
        if len(self.classes) < 2:
            raise UserError(f"{config.data} has {len(self.classes)} class; a classifier needs 2 or more")
        torch.manual_seed(config.seed)
        self.model_args = sized_args(config.model, config.model_args, size=config.size)
        model = build_model(config.model, classes=len(self.classes), model_args=self.model_args)
        self.preprocess = preprocess_for(model, size=config.size)
        self.train_loader = create_loader(
            train_set,
            self.preprocess,
            batch=config.batch,
            train=True,
            seed=config.seed,
            workers=config.workers,
            augment=config.augment or default_augment(config.data),
        )
        self.val_loader = create_loader(
            val_set, self.preprocess, batch=config.batch, train=False, workers=config.workers
        )
        self.learner = Learner(model, config, device=device, steps=len(self.train_loader))
        self.done = 0  # whole epochs
        self.history: list[dict[str, Any]] = []
        self.bad_train, self.bad_val = BadImages(len(train_set)), BadImages(len(val_set))
        self.images = 0
        self.train_seconds = 0.0

    def open(self) -> None:
        """Take the folder, and go on where the run in it ended if that is asked for."""
        state = open_run(self.config)
        if state is None:
            return
        self.done, self.history = state.epoch, state.history
        self.learner.step = state.step
        self.learner.model.load_state_dict(state.model)
        self.learner.optimizer.load_state_dict(state.optimizer)
        write_log(Path(self.config.out), self.history)

    def epochs(self, stop: Stop) -> Evaluation | None:
        """Train the epochs that are left. Gives the last evaluation, None if a signal came before it."""
        if self.done >= self.config.epochs:
            return self._evaluate(stop)
        evaluation = None
        while self.done < self.config.epochs:
            # An epoch's dropout depends on the seed and its number, so that a resumed run repeats it.
            torch.manual_seed(int(np.random.SeedSequence((self.config.seed, self.done)).generate_state(1)[0]))
            stats = train_epoch(
                self.learner,
                self.train_loader,
                epoch=self.done,
                bad=self.bad_train,
                stop=stop,
                progress=self.progress,
            )
            self.images += stats.images
            self.train_seconds += stats.seconds
            if not stats.finished:
                self._save_model()
                logger.warning("stopped in epoch %d; its steps so far are saved", self.done + 1)
                return evaluation
            self.done += 1
            evaluation = self._evaluate(stop)
            if evaluation:
                self.learner.require_finite("validation loss", evaluation.loss, step=self.learner.step)
            self._record(stats, evaluation)
            if stop:
                break
        return evaluation

    def _evaluate(self, stop: Stop) -> Evaluation | None:
        try:
            with self.learner.autocast():
                return evaluate(
                    self.learner.model,
                    self._val_batches(stop),
                    classes=len(self.classes),
                    progress=self.progress,
                )
        except Stopped:
            return None

    def _val_batches(self, stop: Stop) -> Iterator[Batch]:
        for batch in stop.watch(self.val_loader):
            self.bad_val.add(batch)
            yield batch

    def _record(self, stats: EpochStats, evaluation: Evaluation | None) -> None:
        """Log the epoch and save everything."""
        record = {
            "epoch": self.done,
            "lr": self.learner.lr,
            "loss": stats.loss,
            "train_accuracy": stats.accuracy,
            "val_loss": evaluation.loss if evaluation else None,
            "val_accuracy": evaluation.accuracy if evaluation else None,
            "images_per_second": stats.images_per_second,
            "seconds": stats.seconds,
        }
        self.history.append(record)
        out, model = Path(self.config.out), self.learner.model
        self._save_model()
        weights, optimizer = plain_weights(model), self.learner.optimizer.state_dict()
        save_state(out, State(self.done, self.learner.step, weights, optimizer, self.history))
        write_log(out, self.history)
        judged = f"{evaluation.accuracy:.1%}" if evaluation else "not judged"
        logger.info(
            "epoch %d/%d: loss %.3f, accuracy %.1f%% in training, %s in validation, %.0f images/s",
            self.done,
            self.config.epochs,
            stats.loss,
            100 * stats.accuracy,
            judged,
            stats.images_per_second,
        )

    def _save_model(self) -> None:
        save_checkpoint(
            self.config.out,
            self.learner.model,
            classes=self.classes,
            preprocess=self.preprocess,
            model_args=self.model_args,
            training=asdict(self.config),
        )


def default_augment(data: str) -> str:
    """The preset for a dataset: digits must not be mirrored, the rest are taken for photographs."""
    return "digits" if data.partition(":")[0] in ("digits", "digit_scenes") else "photo"
