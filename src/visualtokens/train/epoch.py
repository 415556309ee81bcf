"""One pass over the training images, its statistics and its progress bar."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tqdm import tqdm

from visualtokens.data import BadImages
from visualtokens.tasks.task import E, ExampleLoader
from visualtokens.train.distributed import Stop, Team
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
            result = None
            if min(counts) > 0:
                result = learner.learn(batch, [int(count) for count in counts])
                stats.add(result)
            else:
                learner.leave_out()
            stats.steps += 1
            now = time.perf_counter()
            stats.seconds, last = stats.seconds + now - last, now
            bar.show(stats)
            after_step(result)
            last = time.perf_counter()  # logging and saving do not count as training time
    return True


BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class Bar:
    """The progress bar of one epoch."""

    def __init__(self, bar: tqdm[None]) -> None:
        self._bar = bar

    def show(self, stats: EpochStats) -> None:
        """Advance by one step."""
        if self._bar.disable:
            return
        means = "".join(f", {name} {mean:.1%}" for name, mean in stats.means.items())
        text = f"loss {stats.loss:.3f}{means}, {stats.images_per_second:.0f} images/s"
        self._bar.set_postfix_str(text, refresh=False)  # tqdm refreshes at its own rate
        self._bar.update()


class Progress:
    """Progress bars on stderr; ``shown=None`` shows them on a terminal only."""

    def __init__(self, shown: bool | None) -> None:
        self.shown = shown

    @contextlib.contextmanager
    def epoch(self, number: int, *, steps: int, done: int) -> Iterator[Bar]:
        """Show the bar of an epoch of ``steps`` steps, ``done`` of which were completed before."""
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
            bar.refresh()  # the last steps may have come faster than its refresh rate
