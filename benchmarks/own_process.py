"""Candidates of a benchmark that live in a process of their own each, to be timed in turns.

A model that shares its process with others runs on the heap that they leave. Whether the C library has a
large block at hand, or asks the system for fresh pages, then depends on who ran before; on a CPU that can be
a third of the time. In a process of its own, a model finds what its users find.

A turn lasts a second, so that its median call finds the caches as the one before left them; and nobody is
timed while the threads of another process still spin in the hope of work, which they do for some
milliseconds.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from visualtokens.bench import Timings, interleave, peak_memory
from visualtokens.bench.timing import matmul_canary

Run = Callable[[], object]
TURN = 1.0  # seconds
SPINNING = 0.02  # seconds, more than idle threads do


class OwnProcess:
    """Calling it runs, in another process, the function that ``make()`` gave there, and waits for its end."""

    def __init__(self, make: Callable[[], Run]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        context.Process(target=_serve, args=(theirs, make), daemon=True).start()
        theirs.close()
        self._ask("run")  # compiles, and makes what a library makes only once

    def __call__(self) -> None:
        self._ask("run")

    def peak_memory(self) -> int:
        return int(self._ask("peak_memory"))

    def _ask(self, what: str) -> Any:
        self._connection.send(what)
        return self._connection.recv()  # EOFError if the process is gone; it has told why


def in_turns(candidates: Mapping[str, OwnProcess], *, rounds: int) -> Timings:
    """Time the candidates in turns."""
    measure = matmul_canary()

    def canary() -> float:
        time.sleep(SPINNING)
        seconds = measure()
        time.sleep(SPINNING)
        return seconds

    return interleave(candidates, rounds=rounds, min_seconds=TURN, canary=canary)


def _serve(connection: Connection, make: Callable[[], Run]) -> None:
    run = make()
    with torch.inference_mode():
        while True:
            try:
                asked = connection.recv()
            except EOFError:
                return
            if asked == "run":
                run()
            connection.send(peak_memory(run) if asked == "peak_memory" else None)
