"""What a long computation is doing: a bar on a terminal, elsewhere a line in the log every 30 seconds.

The lines are log records of this module, so a program that imports the library sees them if it shows its log.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
logger = logging.getLogger(__name__)
LINE_SECONDS = 30.0  # between two lines
UNKNOWN = "—"
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


def on_terminal() -> bool:
    """Return whether stderr is a terminal that can show a bar; one of no width cannot."""
    if sys.stderr is None or not sys.stderr.isatty():
        return False
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):  # not a file
        return True


class Progress:
    """The progress of one computation of ``total`` steps, ``done`` of which were completed before.

    ``shown=None`` draws a bar on a terminal and logs lines elsewhere, True always draws the bar, False shows
    nothing. ``unit`` is the noun for one step. ``later`` steps of the same kind follow in other computations,
    such as the next epochs. ``rated=False`` leaves the images per second out.

    >>> with Progress("epoch 1/10", total=450, unit="step") as progress:
    ...     progress.advance(images=64, note=lambda: "loss 2.302")
    """

    def __init__(
        self,
        name: str,
        *,
        total: int | None,
        unit: str,
        done: int = 0,
        later: int = 0,
        shown: bool | None = None,
        rated: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.total, self.unit, self.done, self.later = name, total, unit, done, later
        self._rated = rated
        self._before = done
        self._images = 0
        self._clock = clock
        self._began = self._line = clock()
        self._bar: Any = None
        draws = on_terminal() and importlib.util.find_spec("tqdm") is not None if shown is None else shown
        self._logs = shown is None and not draws
        if draws:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                initial=done,
                desc=name,
                leave=False,
                bar_format=BAR,
                postfix=self._rate(0.0),
                file=sys.stderr,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.refresh()  # the last steps may have come faster than its refresh rate
            self._bar.close()

    def advance(self, *, images: int = 0, note: Callable[[], str] = str) -> None:
        """Count one finished step; the text of ``note`` is shown behind the rate."""
        self.done += 1
        self._images += images
        if self._bar is not None:
            parts = (self._rate(self._clock() - self._began), note())
            self._bar.set_postfix_str(", ".join(filter(None, parts)), refresh=False)
            self._bar.update()
        elif self._logs and (now := self._clock()) - self._line >= LINE_SECONDS:
            self._line = now
            logger.info(self.line(note()))

    def _rate(self, seconds: float) -> str:
        return rate(self._images, seconds) if self._rated else ""

    def line(self, note: str = "") -> str:
        """Return the state as one line of text."""
        elapsed = self._clock() - self._began
        steps = count(self.done if self.total is None else self.total, self.unit)
        of = "" if self.total is None else f"{self.done:,} of "
        parts = [f"{self.name}: {of}{steps}", self._rate(elapsed), note]
        if self.total is not None and self.done > self._before:
            step = elapsed / (self.done - self._before)
            left = self.total - self.done
            parts.append(f"{duration(left * step)} left")
            if self.later:
                parts[-1] += f" ({duration((left + self.later) * step)} in all)"
        return ", ".join(filter(None, parts))


def track(
    items: Iterable[T],
    name: str,
    *,
    total: int | None = None,
    unit: str = "batch",
    images: Callable[[T], int] = len,  # type: ignore[assignment]
    shown: bool | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[T]:
    """Yield the items and report the progress over them; ``images(item)`` is the number of images of one.

    ``total`` is by default the length of ``items``, if it has one.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    with Progress(name, total=total, unit=unit, shown=shown, clock=clock) as progress:
        for item in items:
            count = images(item)
            yield item
            progress.advance(images=count)


@dataclass(frozen=True)
class Counted(Generic[T]):
    """An iterator and its number of items, for :func:`track`."""

    items: Iterator[T]
    total: int

    def __iter__(self) -> Iterator[T]:
        return self.items

    def __len__(self) -> int:
        return self.total


def one_image(_: object) -> int:
    """Return 1: the number of images of an item that is an image, for :func:`track`."""
    return 1


def stage(text: str) -> None:
    """Log what begins now."""
    logger.info(text)


def header(rows: Mapping[str, str], *, shown: bool | None = None) -> None:
    """Log what is about to run, one line for each row; ``shown=None`` leaves it out on a terminal."""
    if shown is False or (shown is None and on_terminal()):
        return
    width = max(map(len, rows))
    for name, text in rows.items():
        logger.info("%s  %s", name.ljust(width), text)


@contextlib.contextmanager
def bars_hidden() -> Iterator[None]:
    """Hide the bars inside the block, which writes to the terminal."""
    if "tqdm" not in sys.modules:
        yield
        return
    from tqdm import tqdm

    with tqdm.external_write_mode(file=sys.stderr):
        yield


# Texts.


def rate(images: float, seconds: float) -> str:
    """Return the images per second as text, with a dash as long as there are none."""
    if images <= 0 or seconds <= 0:
        return f"{UNKNOWN} images/s"
    value = images / seconds
    if value < 10:
        return f"{value:.2g} images/s"
    return f"{value:.0f} images/s"


def duration(seconds: float) -> str:
    """Return a time as text, such as ``12 s``, ``4 min``, ``1 h 12 min`` or ``2 d 3 h``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def model_name(name: str, model_args: Mapping[str, Any]) -> str:
    """Return the name of a model, and of its backbone if it has one."""
    backbone = model_args.get("backbone")
    return name if backbone is None else f"{name} with backbone {backbone}"


def parameters(model: torch.nn.Module) -> str:
    """Return the number of learnable values as text."""
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters"


def hardware(device: torch.device, *, processes: int = 1, workers: int = 0) -> str:
    """Return what computes as text: the device, cores, threads and processes."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    parts = [f"{device}{name}", count(cores, "core"), count(torch.get_num_threads(), "thread")]
    parts.append(count(processes, "process"))
    if workers:
        parts.append(f"{count(workers, 'worker')} for loading" + (" in each" if processes > 1 else ""))
    return ", ".join(parts)


def count(number: int, one: str) -> str:
    """Return a number with its noun, such as ``1 class``, ``2 classes`` or ``1,797 images``."""
    hisses = one.endswith(("s", "ch")) and one != "epoch"
    return f"{number:,} {one if number == 1 else one + ('es' if hisses else 's')}"
