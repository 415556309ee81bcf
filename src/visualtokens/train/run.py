"""A training run: from its configuration to a checkpoint, with evaluations, logs and snapshots."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visualtokens.checkpoint import pick_device
from visualtokens.data import BadImage, BadImages
from visualtokens.errors import UserError
from visualtokens.files import CannotSave, saving
from visualtokens.processes import Stop, Stopped, catch_signals, end_with_torchrun
from visualtokens.progress import Counted, Progress, rate
from visualtokens.tables import metric_name
from visualtokens.tasks.initialize import ResumedFrom
from visualtokens.tasks.schema import without_initial_weights
from visualtokens.tasks.task import Evaluation, Loading, open_training
from visualtokens.train.config import TrainConfig
from visualtokens.train.distributed import Team, join_team, local_device
from visualtokens.train.epoch import EpochStats, train_epoch
from visualtokens.train.fingerprint import fingerprint
from visualtokens.train.folder import open_run, publish, snapshot_to_resume
from visualtokens.train.log import Log, forget_steps_after, log_header, open_sinks, write_history
from visualtokens.train.snapshot import Snapshot, State, load_snapshot, save_snapshot
from visualtokens.train.step import Diverged, Learner, StepResult

logger = logging.getLogger(__name__)


def train(config: TrainConfig, *, progress: bool | None = None) -> TrainResult:
    """Train a model and save it in ``config.out``.

    Saves a snapshot after every epoch, or every ``save_every`` steps. SIGINT and SIGTERM end the run after
    the current step, with a snapshot; the result holds the signal. ``progress`` shows a bar; None shows it
    on a terminal and logs the progress elsewhere. Seeds torch's global generator. Processes started by
    torchrun train together.
    """
    began = time.perf_counter()
    end_with_torchrun()
    device = local_device(pick_device(config.device))
    with join_team(device) as team:
        run = Run(config, device=device, team=team, progress=progress)
        with catch_signals() as stop:
            evaluation = run.train(stop)
    return TrainResult(
        out=config.out,
        classes=run.training.classes,
        history=run.history,
        score=run.score,
        evaluation=evaluation,
        seconds=time.perf_counter() - began,
        images_per_second=run.total.images_per_second,
        data_wait=run.total.data_wait,
        unreadable=run.bad_train.images + run.bad_val.images,
        skipped=run.learner.skipped,
        is_main=team.is_main,
        signal=stop.signal,
    )


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run; the model itself is in the folder ``out``."""

    out: str
    classes: list[str]
    history: list[dict[str, Any]]  # one record per completed epoch, as in log.jsonl
    score: str  # the metric that selects the best epoch
    evaluation: Any | None  # of the last completed epoch; None if there is none
    seconds: float  # of this call
    images_per_second: float  # of the training steps of this call
    data_wait: float  # share of their time spent waiting for images
    unreadable: tuple[BadImage, ...]  # each unreadable image once
    skipped: int  # steps with a loss or gradient that was not finite
    is_main: bool = True  # whether this is the main process
    signal: int | None = None  # the signal that ended the run early

    @property
    def metrics(self) -> dict[str, float]:
        """Validation metrics of the last completed epoch; empty if there is none."""
        return self.evaluation.metrics if self.evaluation else {}

    @property
    def accuracy(self) -> float | None:
        """Validation accuracy; None if the task has none."""
        return self.metrics.get("accuracy")

    @property
    def confusion(self) -> Tensor | None:
        """Confusion matrix ``(classes, classes)``, rows are the labels; None if the task has none."""
        return getattr(self.evaluation, "confusion", None)

    @property
    def best(self) -> float | None:
        """The highest score of all epochs, that of the model in ``out/best``."""
        return max((record[f"val_{self.score}"] for record in self.history), default=None)


class Run:
    """The state of a run. The constructor checks everything the configuration names and writes nothing."""

    def __init__(
        self, config: TrainConfig, *, device: torch.device, team: Team, progress: bool | None
    ) -> None:
        self.config, self.team = config, team
        self.out = Path(config.out)
        self.progress = progress if team.is_main else False
        torch.manual_seed(config.seed)  # decides the initial weights
        self.training = open_training(_without_initial_weights(config))
        self.score = self.training.task.score
        loading = Loading(
            batch=config.batch,
            seed=config.seed,
            workers=config.workers,
            share=team.share,
            pin_memory=device.type == "cuda",
        )
        self.train_loader = self.training.train_loader(loading)
        self.val_loader = self.training.val_loader(loading)
        steps = len(self.train_loader)
        self.learner = Learner(self.training, config, device=device, steps=steps, team=team)
        self.epoch = 0  # completed epochs, including their evaluation
        self.stats = EpochStats()  # of the current epoch
        self.total = EpochStats()  # of the epochs of this call
        self.history: list[dict[str, Any]] = []
        train_images, val_images = self.training.images
        self.bad_train = BadImages(train_images, share=config.max_bad_images)
        self.bad_val = BadImages(val_images, share=config.max_bad_images)
        self.data = fingerprint(self.training) if team.is_main else {}
        self.log: Log | None = None
        self.last: Path | None = None  # the last snapshot

    def train(self, stop: Stop) -> Evaluation | None:
        """Train the remaining epochs; return the last evaluation, None if a signal came before it."""
        with contextlib.ExitStack() as folder:
            self._open(folder)
            if self.progress is not False:
                log_header(self.config, self.training, self.learner.device, processes=self.team.size)
            folder.enter_context(self._logging())
            if self.epoch >= self.config.epochs:
                return self._evaluate(stop)
            last = None
            while self.epoch < self.config.epochs:
                evaluation = self._evaluate(stop) if self._train_epoch(stop) else None
                if evaluation is None:
                    self._snapshot()
                    if self.team.is_main:
                        again = "run the same command again to resume"
                        if self.config.resume != "auto":
                            again = "resume with: vtok train … --resume auto"
                        logger.warning("interrupted at step %d; %s", self.learner.step, again)
                    break
                last = evaluation
                self._finish_epoch(evaluation.metrics)
            return last

    def _open(self, folder: contextlib.ExitStack) -> None:
        """Open the output folder until ``folder`` is closed, and restore the snapshot to resume from."""
        snapshot = self._open_folder(folder)
        if snapshot is None:
            for note in self.training.notes if self.team.is_main else ():
                logger.info("%s", note)
            return
        self.last, state, weights = snapshot
        self.epoch, self.history = state.epoch, state.history
        self.stats = EpochStats(**state.stats)
        self.learner.load(state, weights)
        for bad, split in ((self.bad_train, "train"), (self.bad_val, "val")):
            bad.collect(BadImage(path, reason) for path, reason in state.unreadable[split])
            bad.merge(self.team)
        if self.team.is_main:
            with saving(self.out, self._fallback()):
                publish(self.out, self.last, best=self._is_best())
                write_history(self.out, self.history)
                forget_steps_after(self.out, state.step)
            logger.info("resumed after step %d", state.step)

    def _open_folder(self, folder: contextlib.ExitStack) -> Snapshot | None:
        """Open the folder in the main process; an error there is raised in all, so that none waits."""
        snapshot: Snapshot | None = None
        problem: UserError | CannotSave | None = None
        if self.team.is_main:
            try:
                snapshot = folder.enter_context(open_run(self.config, self.data))
            except (UserError, CannotSave) as error:
                problem = error
        path, problem = self.team.gather((snapshot and snapshot.path, problem))[0]
        if problem is not None:
            raise problem
        if path is not None and snapshot is None:  # in the other processes
            snapshot = Snapshot(path, *load_snapshot(path))
        return snapshot

    @contextlib.contextmanager
    def _logging(self) -> Iterator[None]:
        if not self.team.is_main:
            yield
            return
        sinks = open_sinks(self.config.log, self.out, options=self.config.filled(), step=self.learner.step)
        self.log = Log(self.out, sinks=sinks)
        try:
            yield
        finally:
            self.log.close()

    def _train_epoch(self, stop: Stop) -> bool:
        """Train the rest of the current epoch; return False if a signal ended it early."""
        before = EpochStats(**asdict(self.stats))
        finished = train_epoch(
            self.learner,
            self.train_loader,
            epoch=self.epoch,
            stats=self.stats,
            bad=self.bad_train,
            team=self.team,
            stop=stop,
            progress=Progress(
                f"epoch {self.epoch + 1}/{self.config.epochs}",
                total=len(self.train_loader),
                done=self.stats.steps,
                later=(self.config.epochs - self.epoch - 1) * len(self.train_loader),
                unit="step",
                shown=self.progress,
            ),
            after_step=self._after_step,
        )
        self.total.images += self.stats.images - before.images
        self.total.seconds += self.stats.seconds - before.seconds
        self.total.waited += self.stats.waited - before.waited
        return finished

    def _after_step(self, result: StepResult | None) -> None:
        step = self.learner.step
        if self.log is not None and result is not None:
            if result.problem is not None:
                logger.warning("skipped a step: %s", result.problem)
                self.log.step({"step": step, "epoch": self.epoch + 1, "problem": result.problem})
            elif step % self.config.log_every == 0:
                self.log.step(self._step_record(result))
        every = self.config.save_every
        if every is not None and step % every == 0 and self.stats.steps < len(self.train_loader):
            self._snapshot()

    def _step_record(self, result: StepResult) -> dict[str, Any]:
        return {
            "step": self.learner.step,
            "epoch": self.epoch + 1,
            "lr": self.learner.lr,
            "loss": result.loss / result.images,
            **{name: total / result.images for name, total in result.sums.items()},
            "images_per_second": self.stats.images_per_second,
        }

    def _evaluate(self, stop: Stop) -> Evaluation | None:
        """Evaluate on the validation images; return None if a signal ended it early."""
        self.learner.sync_statistics()
        try:
            with self.learner.autocast():
                evaluation = self.training.evaluate(
                    self.learner.eval_model,
                    Counted(self._val_batches(stop), len(self.val_loader)),
                    progress=self.progress,
                )
        except Stopped:
            return None
        for name, value in evaluation.metrics.items():
            if not math.isfinite(value):
                raise Diverged(
                    f"the validation {name} is {value} at step {self.learner.step}; nothing of this epoch "
                    "was saved; try a lower lr, a longer warm-up or a smaller clip"
                )
        self.bad_val.merge(self.team)
        return evaluation

    def _val_batches(self, stop: Stop) -> Iterator[Any]:
        """Yield the batches; raise :class:`Stopped` when the processes agree that a stop was requested."""
        for batch in self.val_loader:
            self.bad_val.collect(batch.bad)
            signals, found = self.team.exchange([stop.signal or 0, self.bad_val.new]).T.tolist()
            self.bad_val.check(self.team, int(sum(found)))
            if stop.agree(signals):
                raise Stopped
            yield batch

    def _finish_epoch(self, metrics: dict[str, float]) -> None:
        """Log the epoch and save a snapshot."""
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
            name, trained = metric_name(self.score), stats.means.get(self.score)
            logger.info(
                "epoch %d/%d: loss %.3f%s, val %s %.1f%%, %s",
                self.epoch,
                self.config.epochs,
                stats.loss,
                "" if trained is None else f", train {name} {trained:.1%}",
                name,
                100 * metrics[self.score],
                rate(stats.images, stats.seconds),
            )

    def _is_best(self) -> bool:
        """Return whether the epoch that just ended has the highest score so far; the first one wins ties."""
        scores = [record[f"val_{self.score}"] for record in self.history]
        return bool(scores) and self.stats.steps == 0 and scores[-1] > max(scores[:-1], default=-math.inf)

    def _snapshot(self) -> None:
        """Save the state to resume from, and publish the model."""
        self.bad_train.merge(self.team)
        self.bad_val.merge(self.team)
        if not self.team.is_main:
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
                split: [(image.path, image.reason) for image in bad.images]
                for split, bad in (("train", self.bad_train), ("val", self.bad_val))
            },
            data=self.data,
        )
        config = self.training.describe() | {
            "task": self.training.task.name,
            "training": self.config.filled(),
        }
        with saving(self.out, self._fallback()):
            self.last = save_snapshot(self.out, state, weights, config, keep=self.config.keep)
            publish(self.out, self.last, best=self._is_best())

    def _fallback(self) -> str:
        if self.last is None:
            return "there is no snapshot yet"
        return f"the snapshot {self.last.name} is intact; free some space, then resume with --resume auto"


def _without_initial_weights(config: TrainConfig) -> TrainConfig:
    """Return the options of a run that resumes without the sources of its initial weights.

    The snapshot has the weights and describes their input, so the sources may be gone by now.
    """
    snapshot = snapshot_to_resume(config)
    if snapshot is None:
        return config
    model_args = without_initial_weights(config.model_args)
    return replace(config, init=ResumedFrom(snapshot), pretrained=False, model_args=model_args)
