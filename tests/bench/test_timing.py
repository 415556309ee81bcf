"""The machine is a fake one: a clock that only moves when somebody works, and scripted canaries."""

import gc
import itertools

import pytest

from visualtokens.bench.timing import CALIBRATIONS, WARMUPS, interleave, matmul_canary
from visualtokens.errors import UserError


class FakeMachine:
    """Time passes only through :meth:`work`; the log keeps who worked in which order."""

    def __init__(self, canaries=None):
        self.now = 0.0
        self.log = []
        self.canaries = iter(canaries or itertools.repeat(1.0))

    def clock(self):
        return self.now

    def canary(self):
        return next(self.canaries)

    def work(self, name, seconds):
        """A candidate that takes the given seconds, or a new one of an iterator each call."""

        def run():
            self.log.append(name)
            self.now += seconds if isinstance(seconds, float) else next(seconds)

        return run

    def time(self, candidates, **options):
        options = dict(rounds=3, min_seconds=0.0, retries=2, tolerance=0.1) | options
        return interleave(candidates, canary=self.canary, clock=self.clock, **options)


def quiet(turns):
    """Canaries of an undisturbed start and so many turns."""
    return [1.0] * (CALIBRATIONS + 2 * turns)


def test_the_order_rotates_and_every_candidate_has_a_turn_in_every_round():
    machine = FakeMachine()
    timings = machine.time({n: machine.work(n, 1.0) for n in "abc"}, rounds=4)
    warm, turns = machine.log[: 3 * WARMUPS], machine.log[3 * WARMUPS :]
    assert warm == list("aabbcc")
    assert "".join(turns) == "abc" + "bca" + "cab" + "abc"
    assert {name: len(timings.turns[name]) for name in timings.names} == {"a": 4, "b": 4, "c": 4}


def test_seconds_rates_and_paired_ratios():
    machine = FakeMachine()
    # Every round is slower than the one before, for both alike: paired, the ratio is 2 all the time.
    slow = machine.work("slow", iter([9.0, 9.0, 2.0, 4.0, 8.0]))
    fast = machine.work("fast", iter([9.0, 9.0, 1.0, 2.0, 4.0]))
    timings = machine.time({"slow": slow, "fast": fast})
    assert timings.seconds("slow") == [2, 4, 8]
    assert timings.ratios("fast") == [2, 2, 2]
    assert timings.ratios("slow") == [1, 1, 1]
    assert timings.rate("fast", per_call=8).median == 4
    assert timings.ratio("fast").median == timings.ratio("fast").low == timings.ratio("fast").high == 2


def test_a_turn_fills_its_seconds_and_counts_its_median_call():
    machine = FakeMachine()
    burst = machine.work("a", iter([1.0, 1.0, 1.0, 1.0, 50.0]))
    timings = machine.time({"a": burst}, rounds=1, min_seconds=2.5)
    assert timings.calls == {"a": 3}
    assert timings.seconds("a") == [1.0]  # of 1, 1 and 50


def test_a_disturbed_turn_is_discarded_and_repeated():
    # The first turn of b has a slow canary after it, its repetition has none.
    machine = FakeMachine([*quiet(1), 1.0, 1.5, *[1.0] * 100])
    a = machine.work("a", 1.0)
    b = machine.work("b", iter([3.0, 3.0, 99.0, 3.0, 3.0, 3.0]))
    timings = machine.time({"a": a, "b": b})
    assert timings.seconds("b") == [3, 3, 3]
    assert (timings.discarded, timings.noisy, timings.quiet) == (1, 0, True)


def test_a_canary_inside_the_tolerance_is_quiet():
    machine = FakeMachine([*quiet(0), *itertools.repeat(1.09, 100)])
    timings = machine.time({"a": machine.work("a", 1.0)}, tolerance=0.1)
    assert (timings.discarded, timings.noisy) == (0, 0)


def test_a_machine_that_is_never_quiet_ends_and_says_so():
    machine = FakeMachine([*quiet(0), *itertools.repeat(2.0, 1000)])
    timings = machine.time({"a": machine.work("a", 1.0)}, rounds=3, retries=2)
    assert timings.noisy == 3
    assert not timings.quiet
    attempts = len(machine.log) - WARMUPS
    assert attempts == 3 * (1 + 2) + 3  # every turn, its retries, and one more at the end
    assert timings.discarded == attempts - 3


def test_of_disturbed_attempts_the_quietest_stays():
    machine = FakeMachine([*quiet(0), 5.0, 5.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0])
    timings = machine.time({"a": machine.work("a", iter([1.0, 1.0, 5.0, 2.0, 3.0, 4.0]))}, rounds=1)
    assert timings.seconds("a") == [2]
    assert timings.turns["a"][0].canary == 2


def test_a_better_canary_that_comes_late_judges_the_turns_before():
    # All start at 1.0; before the last turn the machine gets faster, so the first two turns are redone.
    machine = FakeMachine([*quiet(2), *[0.5] * 100])
    timings = machine.time({"a": machine.work("a", iter([9.0, 9.0, 7.0, 7.0, 1.0, 2.0, 3.0]))})
    assert timings.best_canary == 0.5
    assert timings.seconds("a") == [2, 3, 1]
    assert (timings.discarded, timings.noisy) == (2, 0)


def test_garbage_collection_rests_during_the_run_only():
    states = []
    machine = FakeMachine()
    machine.time({"a": lambda: states.append(gc.isenabled())})
    assert states[WARMUPS:] == [False] * 3
    assert gc.isenabled()


def test_nothing_to_time_is_an_error():
    with pytest.raises(UserError, match="0 candidates"):
        interleave({})
    with pytest.raises(UserError, match="0 rounds"):
        interleave({"a": lambda: None}, rounds=0)


def test_the_real_canary_and_clock_work_together():
    timings = interleave({"a": lambda: sum(range(1000))}, rounds=2, min_seconds=0.001, retries=0)
    assert timings.best_canary > 0
    assert all(seconds > 0 for seconds in timings.seconds("a"))
    assert matmul_canary(size=8, products=1)() > 0
