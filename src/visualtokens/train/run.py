"""A run: epochs, judgements, and what is written down on the way."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visualtokens.checkpoint import CannotSave, explain_failure
from visualtokens.data import BadImage, BadImages
from visualtokens.errors import UserError
from visualtokens.tasks.task import Loading
from visualtokens.train.config import TrainConfig
from visualtokens.train.distributed import (
    Stop,
    Stopped,
    Team,
    catch_signals,
    join_team,
    local_device,
    pick_device,
)
from visualtokens.train.epoch import EpochStats, Progress, train_epoch
from visualtokens.train.log import Log, forget_steps_after, open_sinks, write_history
from visualtokens.train.snapshot import (
    State,
    load_snapshot,
    open_run,
    publish,
    remove_old_snapshots,
    save_snapshot,
)
from visualtokens.train.step import Diverged, Learner, Taken
from visualtokens.train.tasks import open_task

logger = logging.getLogger(__name__)


class Run:
    """Everything one run holds. Making it checks all that the configuration names and writes nothing."""

    def __init__(
        self, config: TrainConfig, *, device: torch.device, team: Team, progress: bool | None
    ) -> None:
        self.config, self.team = config, team
        self.out = Path(config.out)
        self.progress = progress if team.leads else False
        self.task = open_task(config)
        loading = Loading(
            batch=config.batch,
            seed=config.seed,
            workers=config.workers,
            share=team.share,
            pin_memory=device.type == "cuda",
        )
        self.train_loader = self.task.train_loader(loading)
        self.val_loader = self.task.val_loader(loading)
        steps = len(self.train_loader)
        self.learner = Learner(self.task, config, device=device, steps=steps, team=team)
        self.epoch = 0  # whole ones, the judgement included
        self.stats = EpochStats()  # of the one after those
        self.total = EpochStats()  # of this process's epochs, for the result
        self.history: list[dict[str, Any]] = []
        to_train, to_validate = self.task.images
        self.bad_train = BadImages(to_train, share=config.max_bad_images)
        self.bad_val = BadImages(to_validate, share=config.max_bad_images)
        self.log: Log | None = None
        self.last: Path | None = None  # snapshot

    def go(self, stop: Stop) -> Any | None:
        """Train what is left. Gives the last judgement, None if a signal came before it."""
        self._open()
        with self._logging():
            if self.epoch >= self.config.epochs:
                return self._judge(stop)
            evaluation = None
            while self.epoch < self.config.epochs:
                judged = self._judge(stop) if self._train(stop) else None
                if judged is None:
                    self._snapshot()
                    if self.team.leads:
                        logger.warning("stopped after step %d; all of it is saved", self.learner.step)
                    break
                evaluation = judged
                self._finish_epoch(evaluation.metrics)
            return evaluation

    def _open(self) -> None:
        """Take the folder, and go on where the run in it ended if that is asked for."""
        self.last = self._opened()
        if self.last is None:
            return
        state, weights = load_snapshot(self.last)
        self.epoch, self.history = state.epoch, state.history
        self.stats = EpochStats(**state.stats)
        self.learner.load(state, weights)
        for bad, part in ((self.bad_train, "train"), (self.bad_val, "val")):
            bad.collect(BadImage(path, reason) for path, reason in state.unreadable[part])
            bad.merge(self.team)
        if self.team.leads:
            with explain_failure(self.out, self._what_is_there()):
                publish(self.out, self.last, best=self._is_best())
                write_history(self.out, self.history)
                forget_steps_after(self.out, state.step)
            logger.info("resumed after step %d", state.step)

    def _opened(self) -> Path | None:
        """What the leader finds in the folder; what is wrong with it is told to all, so that nobody waits."""
        found: Path | None = None
        problem: UserError | CannotSave | None = None
        if self.team.leads:
            try:
                found = open_run(self.config)
            except (UserError, CannotSave) as error:
                problem = error
        found, problem = self.team.gather((found, problem))[0]
        if problem is not None:
            raise problem
        return found

    @contextlib.contextmanager
    def _logging(self) -> Iterator[None]:
        if not self.team.leads:
            yield
            return
        sinks = open_sinks(self.config.log, self.out, options=asdict(self.config), step=self.learner.step)
        self.log = Log(self.out, sinks=sinks)
        try:
            yield
        finally:
            self.log.close()

    def _train(self, stop: Stop) -> bool:
        """The rest of the current epoch; False if a signal ended it early."""
        before = EpochStats(**asdict(self.stats))
        finished = train_epoch(
            self.learner,
            self.train_loader,
            epoch=self.epoch,
            stats=self.stats,
            bad=self.bad_train,
            team=self.team,
            stop=stop,
            progress=Progress(self.progress),
            after_step=self._after_step,
        )
        self.total.images += self.stats.images - before.images
        self.total.seconds += self.stats.seconds - before.seconds
        self.total.waited += self.stats.waited - before.waited
        return finished

    def _after_step(self, taken: Taken | None) -> None:
        step = self.learner.step
        if self.log is not None and taken is not None:
            if taken.problem is not None:
                logger.warning("skipped a step: %s", taken.problem)
                self.log.step({"step": step, "epoch": self.epoch + 1, "problem": taken.problem})
            elif step % self.config.log_every == 0:
                self.log.step(self._step_record(taken))
        every = self.config.save_every
        if every is not None and step % every == 0 and self.stats.steps < len(self.train_loader):
            self._snapshot()

    def _step_record(self, taken: Taken) -> dict[str, Any]:
        means = {name: total / taken.images for name, total in taken.sums.items()}
        return {
            "step": self.learner.step,
            "epoch": self.epoch + 1,
            "lr": self.learner.lr,
            "loss": taken.loss / taken.images,
            **means,
            "images_per_second": self.stats.images_per_second,
        }

    def _judge(self, stop: Stop) -> Any | None:
        self.learner.agree_on_statistics()
        try:
            with self.learner.autocast():
                evaluation = self.task.evaluate(
                    self.learner.best_weights, self._val_batches(stop), progress=self.progress
                )
        except Stopped:
            return None
        for name, value in evaluation.metrics.items():
            if not math.isfinite(value):
                raise Diverged(
                    f"the {name} in validation is {value} at step {self.learner.step}; nothing of this epoch "
                    "was saved; try a lower lr, a longer warm-up or a smaller clip"
                )
        self.bad_val.merge(self.team)
        return evaluation

    def _val_batches(self, stop: Stop) -> Iterator[Any]:
        """The batches, until the processes agree that a stop was asked for; then :class:`Stopped`."""
        for batch in self.val_loader:
            self.bad_val.collect(batch.bad)
            signals, found = self.team.exchange([stop.signal or 0, self.bad_val.new]).T.tolist()
            self.bad_val.check(self.team, int(sum(found)))
            if stop.agree(signals):
                raise Stopped
            yield batch

    def _finish_epoch(self, metrics: dict[str, float]) -> None:
        """Log the epoch and save everything."""
        stats = self.stats
        record = {
            "epoch": self.epoch + 1,
            "lr": self.learner.lr,
            "loss": stats.loss,
            **{f"train_{name}": mean for name, mean in stats.means.items()},
            **{f"val_{name}": value for name, value in metrics.items()},
            "skipped": stats.skipped,
            "images_per_second": stats.images_per_second,
            "data_wait": stats.data_wait,
            "seconds": stats.seconds,
        }
        self.history.append(record)
        self.epoch, self.stats = self.epoch + 1, EpochStats()
        self._snapshot()
        if self.log is not None:
            self.log.epoch(self.history, step=self.learner.step)
            score = self.task.score
            seen = f", {score} {stats.means[score]:.1%} in training" if score in stats.means else ""
            logger.info(
                "epoch %d/%d: loss %.3f%s, %.1f%% in validation, %.0f images/s",
                self.epoch,
                self.config.epochs,
                stats.loss,
                seen,
                100 * metrics[score],
                stats.images_per_second,
            )

    def _is_best(self) -> bool:
        """Whether the epoch that has just ended has the highest score so far, the first of equal ones."""
        scores = [record[f"val_{self.task.score}"] for record in self.history]
        return bool(scores) and self.stats.steps == 0 and scores[-1] > max(scores[:-1], default=-math.inf)

    def _snapshot(self) -> None:
        """Save all that the run needs to go on from here, and the model for those who want to use it."""
        self.bad_train.merge(self.team)
        self.bad_val.merge(self.team)
        if not self.team.leads:
            return
        self.learner.require_finite_weights()
        weights, trained = self.learner.weights()
        state = State(
            epoch=self.epoch,
            offset=self.stats.steps,
            step=self.learner.step,
            optimizer=self.learner.optimizer.state_dict(),
            trained=trained,
            history=self.history,
            stats=asdict(self.stats),
            skipped=self.learner.skipped,
            skipped_in_a_row=self.learner.skipped_in_a_row,
            unreadable={
                part: [(image.path, image.reason) for image in bad.images]
                for part, bad in (("train", self.bad_train), ("val", self.bad_val))
            },
        )
        described = self.task.describe() | {"task": self.task.name, "training": asdict(self.config)}
        with explain_failure(self.out, self._what_is_there()):
            self.last = save_snapshot(self.out, state, weights, described)
            publish(self.out, self.last, best=self._is_best())
            remove_old_snapshots(self.out, keep=self.config.keep)

    def _what_is_there(self) -> str:
        if self.last is None:
            return "there is no snapshot yet"
        return f"the snapshot {self.last.name} is intact; make room, then go on with --resume auto"


# The training run, from a configuration to a checkpoint.


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


# What a training run hands back.


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run; the model itself is in the folder ``out``."""

    out: str
    classes: list[str]
    history: list[dict[str, Any]]  # one record per whole epoch, as in log.jsonl
    score: str  # the metric that decides which epoch was the best
    evaluation: Any | None  # what the task found after the last whole epoch; None if there was none
    seconds: float  # of this call, all included
    images_per_second: float  # of the training steps of this call
    data_wait: float  # share of their time in which the model waited for images
    unreadable: tuple[BadImage, ...]  # each image that could not be read, once
    skipped: int  # steps that were skipped because loss or gradient was not finite
    leads: bool = True  # whether this process is the one of several that talks to people
    signal: int | None = None  # what ended the run early

    @property
    def metrics(self) -> dict[str, float]:
        """In validation, after the last whole epoch; empty if there is none."""
        return self.evaluation.metrics if self.evaluation else {}

    @property
    def accuracy(self) -> float | None:
        """Of a classifier."""
        return self.metrics.get("accuracy")

    @property
    def confusion(self) -> Tensor | None:
        """Of a classifier: ``(classes, classes)``, rows are the truth."""
        return getattr(self.evaluation, "confusion", None)

    @property
    def best(self) -> float | None:
        """The highest score of all epochs, which the model in ``out/best`` has."""
        return max((record[f"val_{self.score}"] for record in self.history), default=None)
