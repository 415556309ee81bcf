"""One pass over the training images and its statistics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from visualtokens.data import BadImages
from visualtokens.processes import Stop
from visualtokens.progress import UNKNOWN, Progress
from visualtokens.tables import metric_name
from visualtokens.tasks.task import E, ExampleLoader
from visualtokens.train.distributed import Team
from visualtokens.train.step import Learner, StepResult


@dataclass
class EpochStats:
    """Sums over the steps of an epoch so far, over all processes."""

    steps: int = 0
    images: int = 0
    loss_sum: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    skipped: int = 0  # steps with a loss or gradient that was not finite
    seconds: float = 0.0
    waited: float = 0.0  # seconds of these spent waiting for images

    @property
    def loss(self) -> float:
        """Mean over the images."""
        return self.loss_sum / max(self.images, 1)

    @property
    def means(self) -> dict[str, float]:
        """Mean metrics of the augmented images, each before the step on its batch."""
        return {name: total / max(self.images, 1) for name, total in self.sums.items()}

    @property
    def images_per_second(self) -> float:
        return self.images / max(self.seconds, 1e-9)

    @property
    def data_wait(self) -> float:
        """Share of the time spent waiting for images."""
        return self.waited / max(self.seconds, 1e-9)

    def add(self, result: StepResult) -> None:
        if result.problem is not None:
            self.skipped += 1
            return
        self.images += result.images
        self.loss_sum += result.loss
        for name, total in result.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + total


def train_epoch(
    learner: Learner[E],
    loader: ExampleLoader[E],
    *,
    epoch: int,
    stats: EpochStats,
    bad: BadImages,
    team: Team,
    stop: Stop,
    progress: Progress,
    after_step: Callable[[StepResult | None], None],
) -> bool:
    """Train on the batches of this epoch after ``stats.steps``; return False if a signal stopped it.

    ``bad`` collects unreadable images and raises when there are too many. ``after_step`` is called after
    every step, with None for a step that was left out because a process had no image for it.
    """
    loader.set_epoch(epoch, start=stats.steps)
    learner.train_mode()
    last = time.perf_counter()
    with progress:
        batches = iter(loader)
        for _ in range(stats.steps, len(loader)):
            batch = next(batches)
            stats.waited += time.perf_counter() - last
            bad.collect(batch.bad)
            counts, signals, found = team.exchange([len(batch), stop.signal or 0, bad.new]).T.tolist()
            bad.check(team, int(sum(found)))
            if stop.agree(signals):
                return False
            result = None
            if min(counts) > 0:
                result = learner.learn(batch, [int(count) for count in counts])
                stats.add(result)
            else:
                learner.leave_out()
            stats.steps += 1
            now = time.perf_counter()
            stats.seconds, last = stats.seconds + now - last, now
            progress.advance(images=result.images if result else 0, note=lambda: _note(stats, learner.lr))
            after_step(result)
            last = time.perf_counter()  # logging and saving do not count as training time
    return True


def _note(stats: EpochStats, lr: float) -> str:
    """Return the loss, the accuracy and the learning rate as text."""
    loss = f"loss {stats.loss:.3f}" if stats.images else f"loss {UNKNOWN}"
    accuracies = [f"{metric_name(n)} {mean:.1%}" for n, mean in stats.means.items() if n.endswith("accuracy")]
    return ", ".join([loss, *accuracies, f"lr {lr:.2g}"])
