"""Interleaved timing on a fake machine, with a clock that only candidates advance and scripted canaries."""

import gc
import itertools
import os
import random
import subprocess
import sys

import pytest

from visualtokens.bench.timing import (
    CALIBRATIONS,
    MIN_ROUNDS,
    WARMUPS,
    Spread,
    cpu_stalled,
    interleave,
    matmul_canary,
    median_interval,
    quartiles,
    verdict,
)
from visualtokens.errors import UserError


class FakeMachine:
    """Only :meth:`work` advances the clock; the log lists the candidates in the order of their calls."""

    def __init__(self, canaries=None):
        self.now = 0.0
        self.log = []
        self.canaries = iter(canaries or itertools.repeat(1.0))

    def clock(self):
        return self.now

    def canary(self):
        return next(self.canaries)

    def work(self, name, seconds):
        """A candidate that takes the given seconds, or the next of an iterator in each call."""

        def run():
            self.log.append(name)
            self.now += seconds if isinstance(seconds, float) else next(seconds)

        return run

    def time(self, candidates, **options):
        options = dict(rounds=3, min_seconds=0.0, retries=2, tolerance=0.1, stalled=lambda: None) | options
        return interleave(candidates, canary=self.canary, clock=self.clock, **options)


def quiet(turns):
    """Canaries of an undisturbed calibration and number of turns."""
    return [1.0] * (CALIBRATIONS + 2 * turns)


def test_the_order_rotates():
    machine = FakeMachine()
    timings = machine.time({n: machine.work(n, 1.0) for n in "abc"}, rounds=4)
    warm, turns = machine.log[: 3 * WARMUPS], machine.log[3 * WARMUPS :]
    assert warm == list("aabbcc")
    assert "".join(turns) == "abc" + "bca" + "cab" + "abc"
    assert {name: len(timings.turns[name]) for name in timings.names} == {"a": 4, "b": 4, "c": 4}


def test_seconds_rates_and_paired_ratios():
    machine = FakeMachine()
    # Each round is slower than the one before, for both candidates: the paired ratio is always 2.
    slow = machine.work("slow", iter([9.0, 9.0, 2.0, 4.0, 8.0]))
    fast = machine.work("fast", iter([9.0, 9.0, 1.0, 2.0, 4.0]))
    timings = machine.time({"slow": slow, "fast": fast})
    assert timings.seconds("slow") == [2, 4, 8]
    assert timings.ratios("fast") == [2, 2, 2]
    assert timings.ratios("slow") == [1, 1, 1]
    assert timings.rate("fast", per_call=8).median == 4
    assert timings.ratio("fast").median == timings.ratio("fast").low == timings.ratio("fast").high == 2


def test_a_turn_lasts_min_seconds_and_records_the_median_call():
    machine = FakeMachine()
    burst = machine.work("a", iter([1.0, 1.0, 1.0, 1.0, 50.0]))
    timings = machine.time({"a": burst}, rounds=1, min_seconds=2.5)
    assert timings.calls == {"a": 3}
    assert timings.seconds("a") == [1.0]  # of 1, 1 and 50


def test_a_disturbed_turn_is_discarded_and_repeated():
    # A slow canary follows the first turn of b, but not its repetition.
    machine = FakeMachine([*quiet(1), 1.0, 1.5, *[1.0] * 100])
    a = machine.work("a", 1.0)
    b = machine.work("b", iter([3.0, 3.0, 99.0, 3.0, 3.0, 3.0]))
    timings = machine.time({"a": a, "b": b})
    assert timings.seconds("b") == [3, 3, 3]
    assert (timings.discarded, timings.noisy, timings.quiet) == (1, 0, True)


def test_a_canary_within_the_tolerance_is_quiet():
    machine = FakeMachine([*quiet(0), *itertools.repeat(1.09, 100)])
    timings = machine.time({"a": machine.work("a", 1.0)}, tolerance=0.1)
    assert (timings.discarded, timings.noisy) == (0, 0)


def test_a_busy_machine_is_reported():
    machine = FakeMachine([*quiet(0), *itertools.repeat(2.0, 1000)])
    timings = machine.time({"a": machine.work("a", 1.0)}, rounds=3, retries=2)
    assert timings.noisy == 3
    assert not timings.quiet
    attempts = len(machine.log) - WARMUPS
    assert attempts == 3 * (1 + 2) + 3  # each turn, its retries, and the final check
    assert timings.discarded == attempts - 3


@pytest.mark.parametrize(("share", "quiet"), [(0.02, True), (0.95, False)])
def test_constant_load_is_reported(share, quiet):
    """Load that slows all canaries alike shows only in the time that processes wait for a processor."""
    machine = FakeMachine()
    timings = machine.time({"a": machine.work("a", 1.0)}, stalled=lambda: 5 + share * machine.now)
    assert timings.waiting == pytest.approx(share)
    assert (timings.noisy, timings.quiet) == (0, quiet)


@pytest.mark.skipif(cpu_stalled() is None, reason="the kernel reports no pressure stall information")
def test_a_machine_with_more_processes_than_cores_is_not_quiet():
    cores = len(os.sched_getaffinity(0))
    spin = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    competitors = [subprocess.Popen(spin, stdout=subprocess.PIPE) for _ in range(2 * cores)]
    try:
        for each in competitors:
            each.stdout.readline()  # it runs
        timings = interleave({"a": lambda: sum(range(100_000))}, rounds=3, retries=0)
    finally:
        for each in competitors:
            each.kill()
            each.communicate()
    assert timings.waiting > 0.5
    assert not timings.quiet


def test_no_pressure_stall_information(tmp_path):
    assert cpu_stalled(tmp_path / "missing") is None
    (tmp_path / "cpu").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\n")
    assert cpu_stalled(tmp_path / "cpu") == 2.5


def test_the_quietest_of_disturbed_attempts_is_kept():
    machine = FakeMachine([*quiet(0), 5.0, 5.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0])
    timings = machine.time({"a": machine.work("a", iter([1.0, 1.0, 5.0, 2.0, 3.0, 4.0]))}, rounds=1)
    assert timings.seconds("a") == [2]
    assert timings.turns["a"][0].canary == 2


def test_a_late_best_canary_causes_earlier_turns_to_be_repeated():
    # The machine gets faster before the last turn, so the first two turns are repeated.
    machine = FakeMachine([*quiet(2), *[0.5] * 100])
    timings = machine.time({"a": machine.work("a", iter([9.0, 9.0, 7.0, 7.0, 1.0, 2.0, 3.0]))})
    assert timings.best_canary == 0.5
    assert timings.seconds("a") == [2, 3, 1]
    assert (timings.discarded, timings.noisy) == (2, 0)


def test_garbage_collection_is_disabled_during_the_run_only():
    states = []
    machine = FakeMachine()
    machine.time({"a": lambda: states.append(gc.isenabled())})
    assert states[WARMUPS:] == [False] * 3
    assert gc.isenabled()


def test_invalid_arguments():
    with pytest.raises(UserError, match="0 candidates"):
        interleave({})
    with pytest.raises(UserError, match="0 rounds"):
        interleave({"a": lambda: None}, rounds=0)


def test_real_canary_and_clock():
    timings = interleave({"a": lambda: sum(range(1000))}, rounds=2, min_seconds=0.001, retries=0)
    assert timings.best_canary > 0
    assert all(seconds > 0 for seconds in timings.seconds("a"))
    assert matmul_canary(size=8, products=1)() > 0


def test_quartiles():
    spread = quartiles([5, 1, 4, 2, 3])
    assert spread == Spread(median=3, low=2, high=4)
    assert spread.half == 1
    assert quartiles([2.5]) == Spread(2.5, 2.5, 2.5)


# The textbook table of the two-sided 95 % sign test.
@pytest.mark.parametrize(("n", "k"), [(6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (20, 6)])
def test_the_interval_lies_between_the_known_order_statistics(n, k):
    interval = median_interval(range(1, n + 1))
    assert (interval.low, interval.high) == (k, n + 1 - k)


def test_too_few_values_have_no_interval():
    assert median_interval(range(MIN_ROUNDS - 1)) is None
    assert median_interval(range(MIN_ROUNDS)) is not None


@pytest.mark.parametrize("n", [7, 10])
def test_the_interval_contains_the_median_with_its_confidence(n):
    draw = random.Random(0)
    samples = [[draw.lognormvariate(0, 1) for _ in range(n)] for _ in range(4000)]  # true median 1
    contained = sum(i.low <= 1 <= i.high for i in map(median_interval, samples))
    assert contained / 4000 >= 0.95


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.1, 1.2, 1.15, 1.1, 1.3, 1.2, 1.1], "faster"),
        ([0.9, 0.8, 0.95, 0.9, 0.7, 0.9, 0.9], "slower"),
        ([1.1, 1.2, 0.99, 1.1, 1.3, 1.2, 1.1], "same within noise"),
        ([2.0] * (MIN_ROUNDS - 1), "too few rounds"),
    ],
)
def test_verdict(ratios, expected):
    assert verdict(ratios) == expected
