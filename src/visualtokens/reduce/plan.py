"""From a budget to a schedule: multiply-adds by the formula, speed by measuring on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from visualtokens.errors import UserError, unknown
from visualtokens.reduce.ladder import Rung, ladder, own_size
from visualtokens.reduce.reduction import METHODS, Method

if TYPE_CHECKING:
    from visualtokens.bench import Spread


@dataclass(frozen=True)
class Plan:
    """A schedule that meets a budget, and what is known of it. What was not measured is None."""

    method: str
    keep: tuple[int, ...]  # tokens left after each block: for `reduce(model, plan.method, keep=plan.keep)`
    size: tuple[int, int]  # (H, W) of the images
    macs: int  # of one image
    full_macs: int  # of the model as it was
    batch: int | None = None  # images per call when measured
    speedup: Spread | None = None  # against the model as it was, paired by round: median and its interval
    images_per_second: Spread | None = None  # median and interquartile range
    latency_ms: Spread | None = None  # of one call
    quiet: bool | None = None  # whether the machine was undisturbed
    machine: dict[str, Any] | None = None


def plan(
    model: nn.Module,
    *,
    macs: float | None = None,
    speedup: float | None = None,
    latency_ms: float | None = None,
    method: Method = "weighted_kmedoids",
    size: tuple[int, int] | None = None,
    batch: int | None = None,
    rounds: int = 5,
) -> Plan:
    """The schedule that keeps most tokens among those that meet a budget. Leaves ``model`` as it is.

    >>> found = plan(model, speedup=2)
    >>> visualtokens.reduce(model, found.method, keep=found.keep)

    | budget | is met if |
    |---|---|
    | ``macs`` | one image takes at most so many multiply-adds; up to 1, it is the share of the model's own |
    | ``speedup`` | the median speed of paired turns is at least so many times that of ``model`` |
    | ``latency_ms`` | one call takes at most so long, in the median |

    The first is the formula of :func:`visualtokens.reduce.macs`; the other two are measured here, on the
    device of the model, with random images of ``size`` (H, W), by default the model's own, in ``batch`` (by
    default 8, for latency 1). The schedules are those of :mod:`visualtokens.reduce.ladder`. A budget that
    no schedule meets is refused, with the nearest that one does.
    """
    budgets = {"macs": macs, "speedup": speedup, "latency_ms": latency_ms}
    (name, budget), *more = [(n, v) for n, v in budgets.items() if v is not None] or [("", 0.0)]
    if not name or more:
        raise UserError(f"give one budget, not {len(more) + bool(name)}: macs=, speedup= or latency_ms=")
    if not budget > 0:
        raise UserError(f"{name}={budget} must be more than 0")
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    size = size or own_size(model)
    rungs = ladder(model, method, size=size)
    if name == "macs":
        return _by_formula(rungs, budget, method=method, size=size)
    # Here, because measuring brings modules that nobody else needs.
    from visualtokens.reduce.measure import Speedometer, climb

    images = batch or (1 if name == "latency_ms" else 8)
    meter = Speedometer(model, method=method, size=size, batch=images, rounds=rounds)
    index, found = climb(rungs, meter, name=name, budget=budget)
    return Plan(
        method=method,
        keep=rungs[index].keep,
        size=size,
        macs=rungs[index].macs,
        full_macs=rungs[0].macs,
        batch=images,
        speedup=found.speedup,
        images_per_second=found.images_per_second,
        latency_ms=found.latency_ms,
        quiet=found.quiet,
        machine=meter.machine,
    )


def _by_formula(rungs: list[Rung], budget: float, *, method: str, size: tuple[int, int]) -> Plan:
    most = budget * rungs[0].macs if budget <= 1 else budget
    rung = next((rung for rung in rungs if rung.macs <= most), None)
    if rung is None:
        least = rungs[-1].macs
        raise UserError(
            f"macs={budget:g} is out of reach: {method} with keep={list(rungs[-1].keep)} still takes "
            f"{least:.4g}, {least / rungs[0].macs:.1%} of the whole model; give at least that"
        )
    return Plan(method=method, keep=rung.keep, size=size, macs=rung.macs, full_macs=rungs[0].macs)
