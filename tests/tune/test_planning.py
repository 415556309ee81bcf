"""Budgets are met, or refused with the closest possible value."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.reduce.helpers import randn, small_vit
from visualtokens.bench import Spread, count_macs
from visualtokens.errors import UserError
from visualtokens.reduce import METHODS, reduce
from visualtokens.tune import planning
from visualtokens.tune.calibration import plain_copy
from visualtokens.tune.planning import (
    Measurement,
    Rung,
    Speedometer,
    climb,
    ladder,
    plan,
)

SIZE = (32, 32)
RUNGS = [Rung((64 - i,), 1000 - 9 * i) for i in range(100)]


@pytest.mark.parametrize("method", METHODS)
def test_every_rung_is_cheaper_than_the_one_before(method: str) -> None:
    rungs = ladder(small_vit(), method, size=SIZE)
    assert rungs[0].keep == (64,) * 4
    assert rungs[-1].macs < rungs[0].macs / 2
    for before, rung in pairwise(rungs):
        assert rung.macs < before.macs
        assert all(a >= b for a, b in zip((64, *rung.keep), rung.keep, strict=False))


def test_cost_of_a_rung_is_that_of_the_running_model() -> None:
    model = small_vit()
    rungs = ladder(model, "kmedoids", size=SIZE)
    for rung in (rungs[0], rungs[len(rungs) // 2]):
        assert rung.macs == count_macs(reduce(plain_copy(model), "kmedoids", keep=rung.keep), SIZE)


def test_steps_between_rungs_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a fifth and all of the cost, every budget is met to within 6 %.

    The first step is larger: the last block keeps no patch, which changes nothing that the head reads.
    """
    monkeypatch.undo()
    rungs = ladder(small_vit(), "power_bert", size=SIZE)
    assert rungs[1].keep[-1] == 0
    for before, rung in pairwise(rungs[1:]):
        if rung.macs > 0.2 * rungs[0].macs:
            assert rung.macs > 0.94 * before.macs


def test_heads_that_read_patches_keep_one() -> None:
    model = small_vit("vit_tiny_patch16_224", global_pool="avg", class_token=False)
    assert ladder(model, "merge", size=SIZE)[-1].keep == (1, 1, 1, 1)


def test_plain_copy_shares_only_the_weights() -> None:
    model, images = small_vit(), randn(1, 3, *SIZE)
    with torch.inference_mode():
        expected = model(images)
        other = reduce(plain_copy(model), "merge", keep=0.5)
        assert torch.equal(model(images), expected)
        assert torch.equal(plain_copy(other)(images), expected)
    assert other.patch_embed.proj.weight is model.patch_embed.proj.weight


class FakeMeter:
    """Speed as a function of the multiply-adds; counts the measurements."""

    method = "merge"

    def __init__(self, speed: Callable[[int], float], noise: Sequence[float] = (1.0,)) -> None:
        self.speed, self.noise, self.measurements = speed, itertools.cycle(noise), 0
        self.images = torch.zeros(8, 1)

    def __call__(self, keeps: Sequence[tuple[int, ...]], *, rounds: int | None = None) -> list[Measurement]:
        self.measurements += len(keeps)
        return [self.measure(64), *(self.measure(keep[0]) for keep in keeps)]

    def measure(self, tokens: int) -> Measurement:
        speed = self.speed(1000 - 9 * (64 - tokens)) * (1 if tokens == 64 else next(self.noise))
        return Measurement(*(Spread(v, v, v) for v in (speed, 100 * speed, 50 / speed)), quiet=True)


def with_overhead(macs: int) -> float:
    """A reduced model is slower than its multiply-adds suggest."""
    return 1.0 if macs == 1000 else 1000 / (macs + 150)


def climbed(meter: Any, **budget: Any) -> tuple[int, Measurement]:
    (name, value), *_ = budget.items()
    return climb(RUNGS, meter, name=name, budget=value)


@pytest.mark.parametrize("speedup", [1.01, 2.0, 3.7])
def test_the_first_rung_that_is_fast_enough_is_found(speedup: float) -> None:
    meter = FakeMeter(with_overhead)
    index, found = climbed(meter, speedup=speedup)
    first = next(i for i, rung in enumerate(RUNGS) if with_overhead(rung.macs) >= speedup)
    assert found.speedup.median >= speedup
    assert first <= index <= first + 4
    assert meter.measurements <= 9


def test_latency_budget() -> None:
    index, found = climbed(FakeMeter(with_overhead), latency_ms=20.0)
    assert found.latency_ms.median <= 20
    assert with_overhead(RUNGS[index - 5].macs) < 2.5


def test_noisy_measurements_still_meet_the_budget() -> None:
    meter = FakeMeter(with_overhead, noise=(1.0, 0.93, 1.05, 0.97, 1.02, 0.95))
    for budget in (1.5, 2.0, 3.0):
        assert climbed(meter, speedup=budget)[1].speedup.median >= budget


def test_a_budget_met_by_the_plain_model_keeps_everything() -> None:
    assert climbed(FakeMeter(with_overhead), latency_ms=60.0)[0] == 0


def test_speed_out_of_reach_is_refused_with_the_closest_value() -> None:
    fastest = with_overhead(RUNGS[-1].macs)
    with pytest.raises(UserError, match=f"speedup=9 is out of reach.*at most {fastest:.2f}"):
        climbed(FakeMeter(with_overhead), speedup=9.0)
    with pytest.raises(UserError, match=f"latency_ms=1 is out of reach.*at least {50 / fastest:.3g}"):
        climbed(FakeMeter(with_overhead), latency_ms=1.0)


@pytest.mark.parametrize("budget", [0.4, 1.0, 1e6])
def test_multiply_adds_are_met_as_closely_as_the_ladder_allows(budget: float) -> None:
    model = small_vit()
    found = plan(model, macs=budget, method="kmedoids")
    full = count_macs(model, SIZE)
    limit = budget * full if budget <= 1 else budget
    assert found.full_macs == full
    more = [rung.macs for rung in ladder(model, "kmedoids", size=SIZE) if rung.macs > found.macs]
    assert found.macs <= limit < min(more, default=limit + 1)


def test_the_closest_budget_in_the_error_is_possible() -> None:
    model = small_vit()
    with pytest.raises(UserError, match="out of reach") as caught:
        plan(model, macs=10, method="merge")
    stated = re.search(r"still takes ([\d.e+]+)", str(caught.value))
    assert stated
    assert plan(model, macs=float(stated[1]) * 1.001, method="merge").keep == (0, 0, 0, 0)


def test_planning_does_not_change_the_model() -> None:
    model, images = small_vit(), randn(1, 3, *SIZE)
    before = model(images)
    plan(model, macs=0.5)
    plan(model, latency_ms=1e6, rounds=1)
    assert torch.equal(model(images), before)
    assert "reduction" not in model.__dict__


def test_a_measured_plan_contains_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    model, budgets = small_vit(), []

    def choose(rungs: list[Rung], meter: Speedometer, *, name: str, budget: float) -> object:
        budgets.append((name, budget))
        return 10, meter([rungs[10].keep], rounds=1)[1]

    monkeypatch.setattr(planning, "climb", choose)
    found = plan(model, speedup=1.5, method="merge", batch=3)
    rung = ladder(model, "merge", size=SIZE)[10]
    assert (budgets, found.keep, found.macs, found.batch) == ([("speedup", 1.5)], rung.keep, rung.macs, 3)
    assert found.images_per_second is not None
    assert found.latency_ms is not None
    assert found.images_per_second.median == pytest.approx(3000 / found.latency_ms.median)
    assert found.machine is not None
    assert found.machine["device"] == "cpu"


def test_plans_for_another_image_size() -> None:
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
def test_wrong_budgets_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(small_vit(), **options)
