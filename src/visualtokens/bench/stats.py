"""The few statistics that a comparison of repeated measurements needs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
