import random

import pytest

from visualtokens.bench.timing import MIN_ROUNDS, Spread, median_interval, quartiles, verdict


def test_quartiles_of_a_known_sample():
    spread = quartiles([5, 1, 4, 2, 3])
    assert spread == Spread(median=3, low=2, high=4)
    assert spread.half == 1


def test_one_measurement_has_no_spread():
    assert quartiles([2.5]) == Spread(2.5, 2.5, 2.5)


@pytest.mark.parametrize(
    ("n", "k"), [(6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (20, 6)]
)  # the textbook table of the two-sided 95 % sign test
def test_the_interval_is_between_the_known_order_statistics(n, k):
    interval = median_interval(range(1, n + 1))
    assert (interval.low, interval.high) == (k, n + 1 - k)


def test_too_few_values_have_no_interval():
    assert median_interval(range(MIN_ROUNDS - 1)) is None
    assert median_interval(range(MIN_ROUNDS)) is not None


@pytest.mark.parametrize("n", [7, 10])
def test_the_interval_holds_the_median_as_often_as_it_says(n):
    draw = random.Random(0)
    samples = [[draw.lognormvariate(0, 1) for _ in range(n)] for _ in range(4000)]  # true median 1
    held = sum(i.low <= 1 <= i.high for i in map(median_interval, samples))
    assert held / 4000 >= 0.95


@pytest.mark.parametrize(
    ("ratios", "word"),
    [
        ([1.1, 1.2, 1.15, 1.1, 1.3, 1.2, 1.1], "faster"),
        ([0.9, 0.8, 0.95, 0.9, 0.7, 0.9, 0.9], "slower"),
        ([1.1, 1.2, 0.99, 1.1, 1.3, 1.2, 1.1], "same within noise"),
        ([2.0] * (MIN_ROUNDS - 1), "too few rounds"),
    ],
)
def test_verdict(ratios, word):
    assert verdict(ratios) == word


def test_equal_candidates_are_rarely_called_different():
    draw = random.Random(1)
    words = [verdict([draw.lognormvariate(0, 0.1) for _ in range(7)]) for _ in range(2000)]
    assert words.count("same within noise") / 2000 > 0.95
