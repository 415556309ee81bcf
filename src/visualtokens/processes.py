"""This process among those that torchrun started, stopping it by signals, and time limits. Needs no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def is_main_process() -> bool:
    """Return whether this is the main process, also before the process group exists."""
    return int(os.environ.get("RANK", "0")) == 0


def restarts() -> int:
    """Return how often torchrun restarted this job after one of its processes failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def end_with_torchrun() -> None:
    """Let the kernel kill this process when torchrun, which started it, ends; on Linux only.

    A torchrun that is killed cannot stop its processes.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid())


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent process of this id ends; on Linux only."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # ended between these calls
        os.kill(os.getpid(), signal.SIGKILL)


# Stopping by signals: the first one requests a stop, the second one ends the process.

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """Raised between two batches of an evaluation when a stop was requested."""


class Stop:
    """A stop request, and its signal."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def request(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal; the default handlers return, so that the next one ends the process."""
        self.signal = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    def agree(self, signals: Iterable[float]) -> bool:
        """Return whether any process received a signal; ``signals`` holds 0 for those that did not."""
        received = int(max(signals))
        if received and self.signal is None:
            self.signal = received
        return bool(self)


@contextlib.contextmanager
def catch_signals() -> Iterator[Stop]:
    """Turn SIGINT and SIGTERM into stop requests inside the block; restore the old handlers after it.

    Only the main thread may set handlers; in another thread no request arrives.
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


# Time limits.


class _Late(BaseException):
    """Raised in a thread whose time is over; no ``except Exception`` catches it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if the block takes longer. Python code is interrupted, one call into C is not."""
    thread, lock, done = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not done:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Late))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    except _Late:
        raise TimeoutError(f"not finished after {seconds:g} seconds") from None
    finally:
        timer.cancel()
        with lock:
            done = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)  # if it has not been raised yet
