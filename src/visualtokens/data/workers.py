"""Processes and threads that prepare images."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor
from torch.utils.data import get_worker_info


@functools.cache
def thread_pool(threads: int) -> ThreadPoolExecutor:
    """Threads of this process. Decoding and resizing run at the same time; they do not need Python."""
    return ThreadPoolExecutor(threads, thread_name_prefix="images")


def settle_worker(worker: int) -> None:
    """Leave signals to the process that trains.

    Ctrl-C, and a scheduler that ends a job, signal every process of it. The one that trains wants to
    finish its step; it cannot without its workers. They end when it tells them to, or is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # without it, nobody can tell who sent a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    """Obey SIGTERM of the parent only."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        continue
    os._exit(0)


def share_from_worker(tensors: Iterable[Tensor]) -> None:
    """In a worker, move the tensors of a batch to memory that the process that trains can read.

    Left to the queue's thread, the copies would start up that thread's parallel runtime, whose locks a fork
    may have left taken: the worker would hang.
    """
    if get_worker_info() is not None:
        for tensor in tensors:
            tensor.share_memory_()
