"""One pass over the training images."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tqdm import tqdm

from visualtokens.data import BadImages
from visualtokens.tasks.task import E, ExampleLoader
from visualtokens.train.distributed import Stop, Team
from visualtokens.train.step import Learner, Taken


@dataclass
class EpochStats:
    """What an epoch has come to so far, over all processes."""

    steps: int = 0
    images: int = 0
    loss_sum: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    skipped: int = 0  # steps of which something was not finite
    seconds: float = 0.0
    waited: float = 0.0  # of these, for images

    @property
    def loss(self) -> float:
        """Mean over the images."""
        return self.loss_sum / max(self.images, 1)

    @property
    def means(self) -> dict[str, float]:
        """Of the varied images, each judged before the step that learned from it."""
        return {name: total / max(self.images, 1) for name, total in self.sums.items()}

    @property
    def images_per_second(self) -> float:
        return self.images / max(self.seconds, 1e-9)

    @property
    def data_wait(self) -> float:
        """Share of the time in which the model had to wait for images."""
        return self.waited / max(self.seconds, 1e-9)

    def add(self, taken: Taken) -> None:
        if taken.problem is not None:
            self.skipped += 1
            return
        self.images += taken.images
        self.loss_sum += taken.loss
        for name, total in taken.sums.items():
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
    after_step: Callable[[Taken | None], None],
) -> bool:
    """Learn from the batches of this epoch that ``stats`` does not count yet. False if a signal ended it.

    ``bad`` collects what cannot be read, and raises when that is too much. ``after_step`` is told of every
    step, with None for one that was left out because a process had no image for it.
    """
    loader.set_epoch(epoch, start=stats.steps)
    learner.model.train()
    last = time.perf_counter()
    with progress.epoch(epoch, steps=len(loader), done=stats.steps) as bar:
        batches = iter(loader)
        for _ in range(stats.steps, len(loader)):
            batch = next(batches)
            stats.waited += time.perf_counter() - last
            bad.collect(batch.bad)
            counts, signals, found = team.exchange([len(batch), stop.signal or 0, bad.new]).T.tolist()
            bad.check(team, int(sum(found)))
            if stop.agree(signals):
                return False
            taken = None
            if min(counts) > 0:
                taken = learner.learn(batch, [int(count) for count in counts])
                stats.add(taken)
            else:
                learner.leave_out()
            stats.steps += 1
            now = time.perf_counter()
            stats.seconds, last = stats.seconds + now - last, now
            bar.show(stats)
            after_step(taken)
            last = time.perf_counter()  # logging and saving are not part of it
    return True


# The progress bar.

BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class Bar:
    """The bar of one epoch."""

    def __init__(self, bar: tqdm[None]) -> None:
        self._bar = bar

    def show(self, stats: EpochStats) -> None:
        """Move on by a step."""
        if self._bar.disable:
            return
        means = "".join(f", {name} {mean:.1%}" for name, mean in stats.means.items())
        text = f"loss {stats.loss:.3f}{means}, {stats.images_per_second:.0f} images/s"
        self._bar.set_postfix_str(text, refresh=False)  # the bar refreshes itself, at a pace for eyes
        self._bar.update()


class Progress:
    """Bars on stderr: ``shown`` or not; None shows them on a terminal only."""

    def __init__(self, shown: bool | None) -> None:
        self.shown = shown

    @contextlib.contextmanager
    def epoch(self, number: int, *, steps: int, done: int) -> Iterator[Bar]:
        """The bar of an epoch of so many steps, some of which are done."""
        hidden = None if self.shown is None else not self.shown
        with tqdm(
            total=steps,
            initial=done,
            desc=f"epoch {number + 1}",
            leave=False,
            disable=hidden,
            bar_format=BAR,
        ) as bar:
            yield Bar(bar)
            bar.refresh()  # where it ended, however fast the last steps were
