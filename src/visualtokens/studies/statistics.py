"""Paired differences over seeds, their interval, and the verdict that follows from the interval alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
CONFIRMED = "confirmed at small scale"
CONTRADICTED = "contradicted at small scale"
UNDECIDED = "undecided"


@dataclass(frozen=True)
class Interval:
    """The mean of some differences and its 95 % interval; infinite for fewer than two."""

    mean: float
    low: float
    high: float


def interval(differences: Sequence[float]) -> Interval:
    """Return mean ± t · sd / √n with Student's t for n − 1 degrees of freedom."""
    from scipy.special import stdtrit

    n = len(differences)
    mean = statistics.fmean(differences)
    if n < 2:
        return Interval(mean, -math.inf, math.inf)
    half = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * statistics.stdev(differences) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)


def verdict(found: Interval, *, expect: str, margin: float = 0.0) -> str:
    """Return whether the interval confirms, contradicts or does not decide a claim.

    ``expect`` is what is claimed of the difference: "above" or "below" 0, or the "same" within ± margin.
    """
    if expect == "same":
        if -margin < found.low and found.high < margin:
            return CONFIRMED
        return CONTRADICTED if found.low > margin or found.high < -margin else UNDECIDED
    sign = 1 if expect == "above" else -1
    low, high = sorted((sign * found.low, sign * found.high))
    if low > 0:
        return CONFIRMED
    return CONTRADICTED if high < 0 else UNDECIDED


def mean_sd(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the standard deviation, which a single value does not have."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
