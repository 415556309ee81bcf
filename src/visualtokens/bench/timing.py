"""Timing candidates side by side on a machine that others use too.

All candidates take turns in one process, round by round, the order rotating, so that a slow minute of
the machine hits all of them. Before and after each turn a canary, a fixed matrix product, is timed: a
turn beside a slow canary was disturbed; it is thrown away and taken again.
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
from typing import Literal

import torch

from visualtokens.errors import UserError

Clock = Callable[[], float]
Canary = Callable[[], float]  # returns how many seconds it took

TOLERANCE = 0.15
RETRIES = 3
MIN_SECONDS = 0.2
WARMUPS = 2
CALIBRATIONS = 10


@dataclass(frozen=True)
class Turn:
    """One candidate's turn in one round."""

    seconds: float  # of one call: the median of the turn's calls, so that a short burst costs nothing
    canary: float  # the slower of the two canaries around the turn


@dataclass(frozen=True)
class Timings:
    """What :func:`interleave` measured. The first candidate is what the others are compared with."""

    turns: Mapping[str, Sequence[Turn]]  # one turn per round
    calls: Mapping[str, int]  # calls in each turn
    best_canary: float
    tolerance: float
    discarded: int  # turns that were thrown away

    @property
    def names(self) -> list[str]:
        return list(self.turns)

    @property
    def noisy(self) -> int:
        """The turns that were kept although their canary was slow, because none came out better."""
        return sum(
            t.canary > self.best_canary * (1 + self.tolerance) for ts in self.turns.values() for t in ts
        )

    @property
    def quiet(self) -> bool:
        """Whether the machine let every turn pass undisturbed in the end."""
        return self.noisy == 0

    def seconds(self, name: str) -> list[float]:
        """Seconds per call, round by round."""
        return [turn.seconds for turn in self.turns[name]]

    def rate(self, name: str, per_call: float = 1.0) -> Spread:
        """Calls per second (times ``per_call``): the median and interquartile range over the rounds."""
        return quartiles([per_call / seconds for seconds in self.seconds(name)])

    def ratios(self, name: str) -> list[float]:
        """How many times as fast as the first candidate, in each round."""
        first = self.seconds(self.names[0])
        return [a / b for a, b in zip(first, self.seconds(name), strict=True)]

    def ratio(self, name: str) -> Spread:
        """The median of :meth:`ratios` with its 95 % interval; below 6 rounds, their whole range."""
        ratios = self.ratios(name)
        return median_interval(ratios) or Spread(quartiles(ratios).median, min(ratios), max(ratios))

    def word(self, name: str) -> Word:
        """Whether the candidate is faster or slower than the first, or the noise is larger."""
        return verdict(self.ratios(name))


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 7,
    min_seconds: float = MIN_SECONDS,
    tolerance: float = TOLERANCE,
    retries: int = RETRIES,
    canary: Canary | None = None,
    clock: Clock = time.perf_counter,
) -> Timings:
    """Time the candidates in turns. Each must finish its work before it returns (synchronise a GPU).

    A turn calls its candidate as often as fits ``min_seconds``, at least once, and its median call
    counts; two calls before the first round warm it up.

    A turn whose canary is slower than the best canary of the run by more than ``tolerance`` is repeated
    up to ``retries`` times, and once more at the end if the best canary came late. If the machine never
    gets quiet, the turn with the quietest canary stays and :attr:`Timings.noisy` counts it.
    """
    if not candidates or rounds < 1:
        raise UserError(
            f"cannot time {len(candidates)} candidates in {rounds} rounds; give at least one of each"
        )
    watch = _Watch(canary or matmul_canary(), clock, tolerance, retries)
    names = list(candidates)
    calls = {name: _calls(candidates[name], min_seconds, clock) for name in names}
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    with _without_gc():
        for i in range(rounds):
            start = i % len(names)
            for name in names[start:] + names[:start]:
                turns[name].append(watch.turn(candidates[name], calls[name]))
            gc.collect(0)  # what this round left behind, all of it young
        # The best canary may have come late: a turn that passed beside a worse one gets another chance.
        for name in names:
            turns[name] = [watch.again(turn, candidates[name], calls[name]) for turn in turns[name]]
    return Timings(turns, calls, watch.best, tolerance, watch.discarded)


class _Watch:
    """Takes turns between two canaries, and knows the best canary so far."""

    def __init__(self, canary: Canary, clock: Clock, tolerance: float, retries: int) -> None:
        self.canary = canary
        self.clock = clock
        self.tolerance = tolerance
        self.retries = retries
        self.discarded = 0
        self.best = min(canary() for _ in range(CALIBRATIONS))

    def turn(self, run: Callable[[], object], calls: int) -> Turn:
        quietest = self._attempt(run, calls)
        for _ in range(self.retries):
            if self._quiet(quietest):
                break
            self.discarded += 1
            quietest = min(quietest, self._attempt(run, calls), key=lambda turn: turn.canary)
        return quietest

    def again(self, turn: Turn, run: Callable[[], object], calls: int) -> Turn:
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
    """A canary: the seconds that ``products`` products of ``size``×``size`` matrices take."""
    matrix = torch.full((size, size), 1 / size, device=device)

    def canary() -> float:
        matrix @ matrix  # what ran before left the cache cold: that is not the machine's noise
        synchronize(matrix.device)
        start = time.perf_counter()
        for _ in range(products):
            matrix @ matrix
        synchronize(matrix.device)
        return time.perf_counter() - start

    return canary


def synchronize(device: torch.device) -> None:
    """Wait for the work given to an accelerator; the CPU has none waiting."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _calls(run: Callable[[], object], min_seconds: float, clock: Clock) -> int:
    """Warm up, and find how many calls fill a turn."""
    shortest = math.inf
    for _ in range(WARMUPS):
        start = clock()
        run()
        shortest = min(shortest, clock() - start)
    return max(1, math.ceil(min_seconds / shortest)) if shortest > 0 else 1


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """No garbage collection in the middle of a turn."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# The few statistics that a comparison of repeated measurements needs.

Word = Literal["faster", "slower", "same within noise", "too few rounds"]
CONFIDENCE = 0.95
MIN_ROUNDS = 6  # below, no interval of that confidence exists


@dataclass(frozen=True)
class Spread:
    """A median, and from where to where its measurements spread."""

    median: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half of the width, what stands behind a ±."""
        return (self.high - self.low) / 2


def quartiles(values: Sequence[float]) -> Spread:
    """The median and the interquartile range: half of the measurements lie inside."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def median_interval(values: Sequence[float]) -> Spread | None:
    """The median and an interval that holds the true one with at least 95 % confidence.

    From order statistics, so for any distribution: the true median lies below the k-th smallest of n
    values as often as fewer than k of n fair coins show heads. Below ``MIN_ROUNDS`` values there is none.
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
    """The probability of at most k heads among n fair coins."""
    return sum(math.comb(n, i) for i in range(k + 1)) / 2**n


def verdict(ratios: Sequence[float]) -> Word:
    """What the speed ratios of the rounds say: a difference counts when its interval leaves out 1."""
    interval = median_interval(ratios)
    if interval is None:
        return "too few rounds"
    if interval.low > 1:
        return "faster"
    if interval.high < 1:
        return "slower"
    return "same within noise"
