"""Timing of candidates side by side on a shared machine.

All candidates take turns in one process, round by round in rotating order, so that a slow phase of the
machine affects all of them. Before and after each turn a canary, a fixed matrix product, is timed. A turn
next to a slow canary was disturbed; it is discarded and repeated. Constant load slows all canaries alike, so
the time in which processes waited for a processor is measured as well, where the system reports it.
"""

from __future__ import annotations

import contextlib
import gc
import math
import operator
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from visualtokens.errors import UserError

Clock = Callable[[], float]
Canary = Callable[[], float]  # returns its duration in seconds
Stalled = Callable[[], float | None]  # see cpu_stalled
PRESSURE = Path("/proc/pressure/cpu")
Verdict = Literal["faster", "slower", "same within noise", "too few rounds"]

TOLERANCE = 0.15
# Share of the time in which a process may wait for a processor. With one benchmark on two cores it is 2 %,
# with one more process that computes about 100 %.
MAX_WAITING = 0.2
RETRIES = 3
MIN_SECONDS = 0.2
WARMUPS = 2
CALIBRATIONS = 10
CONFIDENCE = 0.95
MIN_ROUNDS = 6  # fewer values have no interval of that confidence


@dataclass(frozen=True)
class Spread:
    """A median and the range around it."""

    median: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half the width of the range, the number after a ±."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Turn:
    """One candidate's turn in one round."""

    seconds: float  # per call: the median of the calls, which a short disturbance does not affect
    canary: float  # the slower of the two canaries around the turn


@dataclass(frozen=True)
class Timings:
    """Result of :func:`interleave`. The first candidate is the reference of all ratios."""

    turns: Mapping[str, Sequence[Turn]]  # one turn per round
    calls: Mapping[str, int]  # calls in each turn
    best_canary: float
    tolerance: float
    discarded: int  # number of repeated turns
    waiting: float | None = None  # share of the time in which some process waited for a processor

    @property
    def names(self) -> list[str]:
        return list(self.turns)

    @property
    def noisy(self) -> int:
        """Number of turns that were kept despite a slow canary, because no repetition had a faster one."""
        return sum(
            t.canary > self.best_canary * (1 + self.tolerance) for ts in self.turns.values() for t in ts
        )

    @property
    def quiet(self) -> bool:
        """Whether no kept turn was disturbed and processes hardly waited for a processor."""
        return is_quiet(self.noisy, self.waiting)

    def seconds(self, name: str) -> list[float]:
        """Seconds per call, round by round."""
        return [turn.seconds for turn in self.turns[name]]

    def rate(self, name: str, per_call: float = 1.0) -> Spread:
        """Calls per second (times ``per_call``): the median and interquartile range over the rounds."""
        return quartiles([per_call / seconds for seconds in self.seconds(name)])

    def ratios(self, name: str) -> list[float]:
        """Speed relative to the first candidate, round by round."""
        first = self.seconds(self.names[0])
        return [a / b for a, b in zip(first, self.seconds(name), strict=True)]

    def ratio(self, name: str) -> Spread:
        """The median of :meth:`ratios` with its 95 % interval; below 6 rounds, with their full range."""
        ratios = self.ratios(name)
        return median_interval(ratios) or Spread(quartiles(ratios).median, min(ratios), max(ratios))

    def verdict(self, name: str) -> Verdict:
        """Whether the candidate is faster or slower than the first."""
        return verdict(self.ratios(name))


def is_quiet(noisy: int, waiting: float | None) -> bool:
    """Whether a measurement with these values of :class:`Timings` was undisturbed."""
    return noisy == 0 and (waiting is None or waiting <= MAX_WAITING)


def cpu_stalled(pressure: Path = PRESSURE) -> float | None:
    """Seconds since the start of the system in which at least one process waited for a processor.

    From Linux's pressure stall information; None on other systems and where it is disabled.
    """
    try:
        some = next(line for line in pressure.read_text().splitlines() if line.startswith("some"))
    except (OSError, StopIteration):
        return None
    return int(some.rpartition("total=")[2]) / 1e6


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 7,
    min_seconds: float = MIN_SECONDS,
    tolerance: float = TOLERANCE,
    retries: int = RETRIES,
    canary: Canary | None = None,
    clock: Clock = time.perf_counter,
    stalled: Stalled = cpu_stalled,
) -> Timings:
    """Time the candidates in turns. Each must finish its work before it returns (synchronise a GPU).

    A turn calls its candidate as often as fits in ``min_seconds``, at least once, and records the median
    call. Two calls before the first round are warm-up.

    A turn with a canary slower than the best one by more than ``tolerance`` is repeated up to ``retries``
    times, and once more at the end if the best canary came later. If no repetition is undisturbed, the
    turn with the fastest canary is kept, and :attr:`Timings.noisy` counts it.
    """
    if not candidates or rounds < 1:
        raise UserError(
            f"cannot time {len(candidates)} candidates in {rounds} rounds; give at least one of each"
        )
    began, stalled_before = clock(), stalled()
    watch = _Stopwatch(canary or matmul_canary(), clock, tolerance, retries)
    names = list(candidates)
    calls = {name: _calls_per_turn(candidates[name], min_seconds, clock) for name in names}
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    with _without_gc():
        for i in range(rounds):
            start = i % len(names)
            for name in names[start:] + names[:start]:
                turns[name].append(watch.turn(candidates[name], calls[name]))
            gc.collect(0)  # garbage of this round, all in the youngest generation
        # Repeat turns that passed only because the best canary came later.
        for name in names:
            turns[name] = [watch.recheck(turn, candidates[name], calls[name]) for turn in turns[name]]
    stalled_after = stalled()
    waiting = None
    if stalled_before is not None and stalled_after is not None:
        waiting = (stalled_after - stalled_before) / (clock() - began)
    return Timings(turns, calls, watch.best, tolerance, watch.discarded, waiting)


class _Stopwatch:
    """Times turns between two canaries and tracks the best canary so far."""

    def __init__(self, canary: Canary, clock: Clock, tolerance: float, retries: int) -> None:
        self.canary = canary
        self.clock = clock
        self.tolerance = tolerance
        self.retries = retries
        self.discarded = 0
        self.best = min(canary() for _ in range(CALIBRATIONS))

    def turn(self, run: Callable[[], object], calls: int) -> Turn:
        """Time one turn; repeat it while it is disturbed."""
        quietest = self._attempt(run, calls)
        for _ in range(self.retries):
            if self._quiet(quietest):
                break
            self.discarded += 1
            quietest = min(quietest, self._attempt(run, calls), key=lambda turn: turn.canary)
        return quietest

    def recheck(self, turn: Turn, run: Callable[[], object], calls: int) -> Turn:
        """Repeat the turn once if it is disturbed by the standard of the best canary."""
        if self._quiet(turn):
            return turn
        self.discarded += 1
        return min(turn, self._attempt(run, calls), key=lambda turn: turn.canary)

    def _attempt(self, run: Callable[[], object], calls: int) -> Turn:
        before = self.canary()
        ticks = [self.clock()]
        for _ in range(calls):
            run()
            ticks.append(self.clock())
        after = self.canary()
        self.best = min(self.best, before, after)
        return Turn(statistics.median(map(operator.sub, ticks[1:], ticks)), max(before, after))

    def _quiet(self, turn: Turn) -> bool:
        return turn.canary <= self.best * (1 + self.tolerance)


def matmul_canary(device: torch.device | str = "cpu", *, size: int = 512, products: int = 4) -> Canary:
    """A canary that times ``products`` products of ``size``×``size`` matrices."""
    matrix = torch.full((size, size), 1 / size, device=device)

    def canary() -> float:
        matrix @ matrix  # warms the cache that the candidate left cold
        synchronize(matrix.device)
        start = time.perf_counter()
        for _ in range(products):
            matrix @ matrix
        synchronize(matrix.device)
        return time.perf_counter() - start

    return canary


def synchronize(device: torch.device) -> None:
    """Wait for pending work on an accelerator; does nothing on the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _calls_per_turn(run: Callable[[], object], min_seconds: float, clock: Clock) -> int:
    """Warm up; return how many calls fill a turn."""
    shortest = math.inf
    for _ in range(WARMUPS):
        start = clock()
        run()
        shortest = min(shortest, clock() - start)
    return max(1, math.ceil(min_seconds / shortest)) if shortest > 0 else 1


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Disable garbage collection, so that it does not run during a turn."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def quartiles(values: Sequence[float]) -> Spread:
    """Median and interquartile range."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def median_interval(values: Sequence[float]) -> Spread | None:
    """Median and its confidence interval of at least 95 %; None below ``MIN_ROUNDS`` values.

    From order statistics, so for any distribution: the true median lies below the k-th smallest of n
    values with the probability of fewer than k heads among n fair coins.
    """
    n = len(values)
    k = 0
    while _tail(n, k) <= (1 - CONFIDENCE) / 2:
        k += 1
    if k == 0:
        return None
    ordered = sorted(values)
    return Spread(statistics.median(values), ordered[k - 1], ordered[n - k])


def _tail(n: int, k: int) -> float:
    """Probability of at most k heads among n fair coins."""
    return sum(math.comb(n, i) for i in range(k + 1)) / 2**n


def verdict(ratios: Sequence[float]) -> Verdict:
    """Faster or slower if the confidence interval of the speed ratios excludes 1."""
    interval = median_interval(ratios)
    if interval is None:
        return "too few rounds"
    if interval.low > 1:
        return "faster"
    if interval.high < 1:
        return "slower"
    return "same within noise"
