"""The progress bar."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from visualtokens.train.epoch import EpochStats

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
