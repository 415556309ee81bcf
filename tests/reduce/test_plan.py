"""Budgets are met, or refused with the nearest that can be."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.reduce.small import small_vit
from visualtokens.bench import Spread, count_macs, interleave
from visualtokens.errors import UserError
from visualtokens.reduce.reduction import reduce
from visualtokens.tune import planning as measure
from visualtokens.tune.planning import Measured, Rung, climb, ladder, plan

RUNGS = [Rung((64 - i,), 1000 - 9 * i) for i in range(100)]


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call per turn and no repeats: what is measured does not matter here."""
    monkeypatch.setattr(measure, "interleave", partial(interleave, min_seconds=0.0, retries=0))


class FakeMeter:
    """Speed as a function of the multiply-adds; counts what it was asked."""

    method = "merge"

    def __init__(self, speed: Callable[[int], float], noise: Sequence[float] = (1.0,)) -> None:
        self.speed, self.noise, self.asked = speed, itertools.cycle(noise), 0
        self.images = torch.zeros(8, 1)

    def __call__(self, keeps: Sequence[tuple[int, ...]], *, rounds: int | None = None) -> list[Measured]:
        self.asked += len(keeps)
        return [self.measured(64), *(self.measured(keep[0]) for keep in keeps)]

    def measured(self, tokens: int) -> Measured:
        speed = self.speed(1000 - 9 * (64 - tokens)) * (1 if tokens == 64 else next(self.noise))
        return Measured(*(Spread(v, v, v) for v in (speed, 100 * speed, 50 / speed)), quiet=True)


def overhead(macs: int) -> float:
    """A pooled model is slower than its multiply-adds promise."""
    return 1.0 if macs == 1000 else 1000 / (macs + 150)


@pytest.mark.parametrize("speedup", [1.01, 1.5, 2.0, 3.7])
def test_the_first_rung_that_is_fast_enough_is_found(speedup: float) -> None:
    meter = FakeMeter(overhead)
    index, found = climb(RUNGS, meter, name="speedup", budget=speedup)  # type: ignore[arg-type]
    first = next(i for i, rung in enumerate(RUNGS) if overhead(rung.macs) >= speedup)
    assert found.speedup.median >= speedup
    assert first <= index <= first + 4
    assert meter.asked <= 9


def test_a_latency_is_met_in_the_same_way() -> None:
    index, found = climb(RUNGS, FakeMeter(overhead), name="latency_ms", budget=20.0)  # type: ignore[arg-type]
    assert found.latency_ms.median <= 20
    assert overhead(RUNGS[index - 5].macs) < 2.5


def test_noise_does_not_make_it_miss() -> None:
    meter = FakeMeter(overhead, noise=(1.0, 0.93, 1.05, 0.97, 1.02, 0.95))
    for budget in (1.5, 2.0, 3.0):
        _, found = climb(RUNGS, meter, name="speedup", budget=budget)  # type: ignore[arg-type]
        assert found.speedup.median >= budget


def test_what_is_met_already_keeps_everything() -> None:
    assert climb(RUNGS, FakeMeter(overhead), name="latency_ms", budget=60.0)[0] == 0  # type: ignore[arg-type]


def test_a_speed_out_of_reach_is_refused_with_the_nearest() -> None:
    fastest = overhead(RUNGS[-1].macs)
    with pytest.raises(UserError, match=f"speedup=9 is out of reach.*at most {fastest:.2f}"):
        climb(RUNGS, FakeMeter(overhead), name="speedup", budget=9.0)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"latency_ms=1 is out of reach.*at least {50 / fastest:.3g}"):
        climb(RUNGS, FakeMeter(overhead), name="latency_ms", budget=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [0.4, 0.75, 1.0, 1e6])
def test_multiply_adds_are_met_as_closely_as_the_ladder_allows(budget: float) -> None:
    model = small_vit()
    found = plan(model, macs=budget, method="kmedoids")
    full = count_macs(model, (32, 32))
    most = budget * full if budget <= 1 else budget
    assert found.full_macs == full
    assert found.macs == count_macs(reduce(model, found.method, keep=found.keep), (32, 32))  # type: ignore[arg-type]
    dearer = [rung.macs for rung in ladder(model, "kmedoids", size=(32, 32)) if rung.macs > found.macs]
    assert found.macs <= most
    assert min(dearer, default=most + 1) > most


def test_the_nearest_budget_that_a_refusal_names_is_possible() -> None:
    model = small_vit()
    with pytest.raises(UserError, match="out of reach") as caught:
        plan(model, macs=10, method="merge")
    named = re.search(r"still takes ([\d.e+]+)", str(caught.value))
    assert named
    assert plan(model, macs=float(named[1]) * 1.001, method="merge").keep == (0, 0, 0, 0)


def test_planning_leaves_the_model_alone() -> None:
    model, images = small_vit(), torch.randn(1, 3, 32, 32)
    before: Tensor = model(images)
    plan(model, macs=0.5)
    plan(model, latency_ms=1e6, rounds=1)
    assert torch.equal(model(images), before)
    assert "reduction" not in model.__dict__


def test_a_measured_plan_says_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_vit()
    asked: list[float] = []

    def choose(rungs: list[Rung], meter: measure.Speedometer, *, name: str, budget: float) -> object:
        asked.append(budget)
        return 30, meter([rungs[30].keep], rounds=1)[1]

    monkeypatch.setattr(measure, "climb", choose)
    found = plan(model, speedup=1.5, method="merge", batch=3)
    rung = ladder(model, "merge", size=(32, 32))[30]
    assert (asked, found.keep, found.macs, found.batch) == ([1.5], rung.keep, rung.macs, 3)
    assert found.images_per_second is not None
    assert found.latency_ms is not None
    assert found.images_per_second.median == pytest.approx(3000 / found.latency_ms.median)
    assert found.machine is not None
    assert found.machine["device"] == "cpu"


def test_another_image_size_is_planned_for() -> None:
    model = small_vit(dynamic_img_size=True)
    found = plan(model, macs=0.5, method="merge", size=(48, 32))
    assert found.keep[0] <= 96
    assert found.full_macs == count_macs(model, (48, 32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one budget, not 0"),
        ({"macs": 1e6, "speedup": 2}, "give one budget, not 2"),
        ({"speedup": 0}, "speedup=0 must be more than 0"),
        ({"macs": 0.5, "method": "mergee"}, "unknown method 'mergee'; did you mean 'merge'"),
    ],
)
def test_unclear_budgets_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(small_vit(), **options)  # type: ignore[arg-type]
