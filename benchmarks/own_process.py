"""Benchmark candidates that each run in a process of their own and are timed in turns.

Models in one process share a heap. Whether the allocator reuses a large block or requests new pages then
depends on the model that ran before; on a CPU this can be a third of the time. A process of its own gives
each model the conditions of its users.

A turn lasts a second by default, so that the median call runs with warm caches. Between turns the script
waits until the idle threads of the previous process have stopped spinning, which takes some milliseconds.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from visualtokens.bench import Timings, interleave, peak_memory
from visualtokens.bench.timing import RETRIES, Canary, matmul_canary

Run = Callable[[], object]
TURN = 1.0  # seconds
SPINNING = 0.02  # seconds; idle threads spin for less


class OwnProcess:
    """A function that ``make()`` creates in another process. A call runs it and waits until it returns."""

    def __init__(self, make: Callable[[], Run]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        context.Process(target=_serve, args=(theirs, make), daemon=True).start()
        theirs.close()
        self._ask("run")  # compilation and one-time initialisation

    def __call__(self) -> None:
        self._ask("run")

    def peak_memory(self) -> int:
        return int(self._ask("peak_memory"))

    def rate(self, seconds: float) -> float:
        """Calls per second of the other process's clock; a call in progress at the end is completed."""
        return float(self._ask(seconds))

    def _ask(self, what: str | float) -> Any:
        self._connection.send(what)
        return self._connection.recv()  # EOFError if the process died; its error is on stderr


def in_turns(
    candidates: Mapping[str, OwnProcess], *, rounds: int, seconds: float = TURN, retries: int = RETRIES
) -> Timings:
    """Time the candidates in turns of ``seconds``.

    On a machine whose speed varies all the time, many short turns without retries give narrower intervals of
    the ratios than few long ones: the turns of a round are closer together.
    """
    return interleave(
        candidates, rounds=rounds, min_seconds=seconds, retries=retries, canary=settled_canary()
    )


def settled_canary() -> Canary:
    """A canary before and after which idle threads stop spinning."""
    measure = matmul_canary()

    def canary() -> float:
        time.sleep(SPINNING)
        seconds = measure()
        time.sleep(SPINNING)
        return seconds

    return canary


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
                connection.send(None)
            else:
                connection.send(peak_memory(run) if asked == "peak_memory" else _rate(run, asked))


def _rate(run: Run, seconds: float) -> float:
    calls, began = 0, time.perf_counter()
    while True:
        run()
        calls += 1
        passed = time.perf_counter() - began
        if passed >= seconds:
            return calls / passed
