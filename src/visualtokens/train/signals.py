"""Stopping a run from outside: the first signal asks, the second one ends the process."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """Raised between two batches of an evaluation once a stop was asked for."""


class Stop:
    """Whether somebody asked this process to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def request(self, number: int, frame: FrameType | None = None) -> None:
        """The signal handler. Gives the signals back to the system, so that the next one ends at once."""
        self.signal = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    def agree(self, signals: Iterable[float]) -> bool:
        """Stop if one of the processes that train together was asked to; 0 stands for one that was not."""
        asked = int(max(signals))
        if asked and self.signal is None:
            self.signal = asked
        return bool(self)


@contextlib.contextmanager
def catch_signals() -> Iterator[Stop]:
    """Turn SIGINT and SIGTERM into a request inside the block; the old handlers come back after it.

    Only the main thread may set handlers; in another one the block never sees a request.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {each: signal.signal(each, stop.request) for each in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
