"""One pass over the training images."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tqdm import tqdm

from visualtokens.data import BadImages, Batch, Loader
from visualtokens.train.signals import Stop, Stopped
from visualtokens.train.step import Learner

BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


@dataclass
class EpochStats:
    """What an epoch came to; ``finished`` is false when a signal ended it early."""

    images: int = 0
    correct: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    finished: bool = True

    @property
    def loss(self) -> float:
        """Mean over the images."""
        return self.loss_sum / max(self.images, 1)

    @property
    def accuracy(self) -> float:
        """Of the varied images, each judged before the step that learned from it."""
        return self.correct / max(self.images, 1)

    @property
    def images_per_second(self) -> float:
        return self.images / max(self.seconds, 1e-9)


def train_epoch(
    learner: Learner, loader: Loader, *, epoch: int, bad: BadImages, stop: Stop, progress: bool | None
) -> EpochStats:
    """Learn from every batch once, in the order of this epoch; ends after the current step on a signal.

    ``bad`` collects what cannot be read, and raises when that is too much.
    """
    stats = EpochStats()
    loader.set_epoch(epoch)
    learner.model.train()
    start = time.perf_counter()
    hidden = None if progress is None else not progress
    with tqdm(loader, desc=f"epoch {epoch + 1}", leave=False, disable=hidden, bar_format=BAR) as bar:
        try:
            for batch in stop.watch(bar):
                bad.add(batch)
                _learn(learner, batch, stats)
                stats.seconds = time.perf_counter() - start
                bar.set_postfix_str(
                    f"loss {stats.loss:.3f}, accuracy {stats.accuracy:.1%}, "
                    f"{stats.images_per_second:.0f} images/s",
                    refresh=False,  # the bar refreshes itself, at a pace for eyes
                )
        except Stopped:
            stats.finished = False
    return stats


def _learn(learner: Learner, batch: Batch, stats: EpochStats) -> None:
    if len(batch.images) == 0:
        learner.skip()
        return
    loss, correct = learner.learn(batch.images, batch.labels)
    stats.images += len(batch.images)
    stats.correct += correct
    stats.loss_sum += loss * len(batch.images)
