"""Intervals against scipy and by simulation; verdicts at every position of the interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from visualtokens.studies.statistics import (
    CONFIRMED,
    CONTRADICTED,
    UNDECIDED,
    Interval,
    interval,
    mean_sd,
    verdict,
)


@pytest.mark.parametrize("values", [[0.1, 0.3], [0.02, -0.01, 0.03], [1.0, 2.0, 4.0, 8.0, 16.0]])
def test_interval_is_that_of_the_paired_t_test(values: list[float]) -> None:
    found = interval(values)
    low, high = stats.ttest_rel(values, [0.0] * len(values)).confidence_interval(0.95)
    assert (found.mean, found.low, found.high) == pytest.approx((np.mean(values), low, high))


def test_interval_covers_the_true_difference_19_times_of_20() -> None:
    rng = np.random.default_rng(0)
    found = [interval(list(rng.normal(0.5, 2.0, 3))) for _ in range(4_000)]
    covered = np.mean([each.low <= 0.5 <= each.high for each in found])
    assert covered == pytest.approx(0.95, abs=0.012)  # 3.5 standard errors


def test_one_seed_decides_nothing() -> None:
    found = interval([0.5])
    assert (found.low, found.high) == (-math.inf, math.inf)
    for expect in ("above", "below"):
        assert verdict(found, expect=expect) == UNDECIDED
    assert verdict(found, expect="same", margin=1.0) == UNDECIDED


@pytest.mark.parametrize(
    ("low", "high", "above", "below", "same"),
    [
        (0.5, 1.5, CONFIRMED, CONTRADICTED, UNDECIDED),
        (-1.5, -0.5, CONTRADICTED, CONFIRMED, UNDECIDED),
        (-0.5, 0.5, UNDECIDED, UNDECIDED, CONFIRMED),
        (0.2, 0.4, CONFIRMED, CONTRADICTED, CONFIRMED),
        (1.2, 3.0, CONFIRMED, CONTRADICTED, CONTRADICTED),
        (-3.0, -1.2, CONTRADICTED, CONFIRMED, CONTRADICTED),
        (-3.0, 3.0, UNDECIDED, UNDECIDED, UNDECIDED),
        (0.0, 0.5, UNDECIDED, UNDECIDED, CONFIRMED),  # an interval that touches zero decides nothing
    ],
)
def test_verdict_follows_from_the_interval(
    low: float, high: float, above: str, below: str, same: str
) -> None:
    found = Interval((low + high) / 2, low, high)
    assert verdict(found, expect="above") == above
    assert verdict(found, expect="below") == below
    assert verdict(found, expect="same", margin=1.0) == same


def test_mean_sd() -> None:
    assert mean_sd([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert mean_sd([2.0]) == (2.0, None)
