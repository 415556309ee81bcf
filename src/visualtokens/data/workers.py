"""Worker processes of a loader: signals, and errors that end the iteration."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import TypeVar

from visualtokens.errors import UserError

B = TypeVar("B")


def errors_as_items(batches: Iterator[B]) -> Iterator[B | UserError]:
    """The batches; a :class:`UserError` becomes the last item.

    ``DataLoader`` would raise it in the main process with the worker's traceback as its message.
    """
    try:
        yield from batches
    except UserError as error:
        yield error


def raise_errors(items: Iterator[B | UserError]) -> Iterator[B]:
    """The inverse of :func:`errors_as_items`, in the main process; the workers have ended when it raises."""
    error = None
    for item in items:
        if isinstance(item, UserError):
            error = item
            break
        yield item
    # Held by a traceback, the iterator would be left to the garbage collector, which first ends the queues
    # that tell the workers to stop: torch then waits five seconds for each of them.
    del items
    if error is not None:
        raise error


@contextlib.contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM in this thread, so that all threads of a worker that is forked here have it blocked.

    torch starts threads in a worker before ``worker_init_fn`` runs.
    """
    if not hasattr(signal, "sigwaitinfo"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent(worker: int) -> None:
    """Set up a worker to outlive signals that are sent to the whole job.

    Ctrl-C, and a scheduler that ends a job, signal every process. The training process finishes its step,
    for which it needs its workers; they exit on its SIGTERM, or when it exits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # without it, the sender of a signal is unknown
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_on_sigterm_of, args=(os.getppid(),), daemon=True).start()


def _exit_on_sigterm_of(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        continue
    os._exit(0)
