"""Find the schedule that meets a budget of multiply-adds, speed-up or latency.

:func:`ladder` lists schedules by cost, :class:`Speedometer` measures them on this machine, and :func:`plan`
returns the one that keeps most tokens within the budget.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn

from visualtokens.bench import Spread, Timings, interleave, machine, matmul_canary
from visualtokens.bench.comparison import Candidate, Run, prepare
from visualtokens.bench.timing import quartiles
from visualtokens.errors import UserError, unknown
from visualtokens.progress import count, stage
from visualtokens.reduce.blocks import transformer
from visualtokens.reduce.methods import METHODS
from visualtokens.reduce.reduction import reduce, restore
from visualtokens.reduce.schedule import macs as formula_macs

MIN_SHARE = 1 / 13  # of the patches after the last block, unless pooling starts in the first block
STEPS = 60  # schedules per first pooled block
FULL = "full"  # name of the plain model among the candidates
PROBE_ROUNDS = 2  # rounds of the first, short measurement
ATTEMPTS = 6  # full measurements per plan
MARGIN = 0.01  # aim this far above the budget (log scale), and farther with every attempt
SLACK = 0.04  # stop as soon as the budget is exceeded by no more than this (log scale)


@dataclass(frozen=True)
class Plan:
    """A schedule that meets a budget. Fields that were not measured are None."""

    method: str
    keep: tuple[int, ...]  # tokens after each block, for reduce(model, plan.method, keep=plan.keep)
    size: tuple[int, int]  # (H, W) of the images
    macs: int  # of one image
    full_macs: int  # of the plain model
    batch: int | None = None  # images per call in the measurement
    speedup: Spread | None = None  # over the plain model, paired by round: median and its interval
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
    method: str = "weighted_kmedoids",
    size: tuple[int, int] | None = None,
    batch: int | None = None,
    rounds: int = 5,
) -> Plan:
    """The schedule that keeps most tokens among those that meet a budget. ``model`` is not changed.

    >>> found = plan(model, speedup=2)
    >>> visualtokens.reduce(model, found.method, keep=found.keep)

    | budget | is met if |
    |---|---|
    | ``macs`` | one image takes at most this many multiply-adds; up to 1, a share of the plain model's |
    | ``speedup`` | the median speed-up over ``model``, paired by round, is at least this |
    | ``latency_ms`` | the median time of one call is at most this |

    ``macs`` is computed by :func:`visualtokens.reduce.macs`. The other two are measured on the device of the
    model, with random images of ``size`` (H, W), by default the model's own, in batches of ``batch``, by
    default 8, or 1 for latency. If no schedule of :func:`ladder` meets the budget, the error states the
    closest value that is possible.
    """
    budgets = {"macs": macs, "speedup": speedup, "latency_ms": latency_ms}
    given = [(name, value) for name, value in budgets.items() if value is not None]
    if len(given) != 1:
        raise UserError(f"give one budget, not {len(given)}: macs=, speedup= or latency_ms=")
    (name, budget), *_ = given
    if not budget > 0:
        raise UserError(f"{name}={budget} must be more than 0")
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    size = size or input_size(model)
    rungs = ladder(model, method, size=size)
    if name == "macs":
        rung = _first_within(rungs, budget, method)
        return Plan(method=method, keep=rung.keep, size=size, macs=rung.macs, full_macs=rungs[0].macs)
    batch = batch or (1 if name == "latency_ms" else 8)
    meter = Speedometer(model, method=method, size=size, batch=batch, rounds=rounds)
    index, found = climb(rungs, meter, name=name, budget=budget)
    return Plan(
        method=method,
        keep=rungs[index].keep,
        size=size,
        macs=rungs[index].macs,
        full_macs=rungs[0].macs,
        batch=batch,
        speedup=found.speedup,
        images_per_second=found.images_per_second,
        latency_ms=found.latency_ms,
        quiet=found.quiet,
        machine=meter.machine,
    )


def _first_within(rungs: Sequence[Rung], budget: float, method: str) -> Rung:
    """The first rung within a budget of multiply-adds."""
    limit = budget * rungs[0].macs if budget <= 1 else budget
    rung = next((rung for rung in rungs if rung.macs <= limit), None)
    if rung is None:
        least = rungs[-1].macs
        raise UserError(
            f"macs={budget:g} is out of reach: {method} with keep={list(rungs[-1].keep)} still takes "
            f"{least:.4g}, {least / rungs[0].macs:.1%} of the plain model; give at least that"
        )
    return rung


# Candidate schedules, from the plain model down to its class token.


@dataclass(frozen=True)
class Rung:
    """A schedule and its cost."""

    keep: tuple[int, ...]  # tokens after each block
    macs: int  # of one image


def ladder(model: nn.Module, method: str, *, size: tuple[int, int]) -> list[Rung]:
    """Schedules for images of ``size`` (H, W) in decreasing order of multiply-adds, the plain model first.

    Without fine-tuning, pooling in early blocks and very few tokens at the end cost most accuracy. So the
    first quarter of the blocks keeps everything and the others keep a constant ratio; pooling starts a block
    earlier where less than ``MIN_SHARE`` would be left at the end.
    """
    plain = plain_copy(model)
    vit: Any = transformer(plain)
    patches = math.prod(vit.patch_embed.dynamic_feat_size(size))
    fewest = 0 if vit.global_pool == "token" and vit.num_prefix_tokens else 1
    rungs: list[Rung] = []
    for keep in _schedules(len(vit.blocks), patches, fewest):
        reduce(plain, method, keep=keep)
        tokens = vit.reduction.schedule.tokens(patches)  # conv cannot reach every K
        cost = formula_macs(plain, patches=patches).total
        if not rungs or cost < rungs[-1].macs:
            rungs.append(Rung(tokens, cost))
    return rungs


def _schedules(blocks: int, patches: int, fewest: int) -> Iterator[tuple[int, ...]]:
    yield (patches,) * blocks
    for first in range(blocks // 4, -1, -1):
        lowest, steps = (MIN_SHARE, STEPS) if first else (1e-9, 3 * STEPS)
        for step in range(1, steps + 1):
            yield constant_ratio(lowest ** (step / steps), blocks, patches, first=first, fewest=fewest)
    yield (fewest,) * blocks


def constant_ratio(
    share: float, blocks: int, patches: int, *, first: int = 0, fewest: int = 0
) -> tuple[int, ...]:
    """Tokens per block: from block ``first`` on, all blocks keep the same ratio, which leaves ``share``."""
    left = (share ** ((i + 1) / (blocks - first)) for i in range(blocks - first))
    return (patches,) * first + tuple(max(fewest, math.ceil(patches * part - 1e-9)) for part in left)


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy of the model without reduction that shares its weights."""
    shared = {id(weight): weight for weight in chain(model.parameters(), model.buffers())}
    other: nn.Module = copy.deepcopy(model, shared)
    return restore(other) if "reduction" in transformer(other).__dict__ else other


def input_size(model: nn.Module) -> tuple[int, int]:
    """The image size (H, W) that the model was created for."""
    vit: Any = transformer(model)
    height, width = vit.patch_embed.img_size
    return height, width


# Measuring the speed of schedules, and finding the first that is fast enough.


@dataclass(frozen=True)
class Measurement:
    """The speed of one schedule, measured side by side with the plain model."""

    speedup: Spread
    images_per_second: Spread
    latency_ms: Spread
    quiet: bool

    def score(self, name: str, budget: float) -> float:
        """The factor by which the budget is met; below 1 it is missed."""
        return self.speedup.median / budget if name == "speedup" else budget / self.latency_ms.median


class Speedometer:
    """Measures schedules of a model side by side with the plain model, on random images."""

    def __init__(
        self, model: nn.Module, *, method: str, size: tuple[int, int], batch: int, rounds: int
    ) -> None:
        like = next(model.parameters())
        channels: int = next(m for m in model.modules() if isinstance(m, nn.Conv2d)).in_channels
        noise = torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(0))
        self.images = noise.to(like.device, like.dtype)
        self.model, self.method, self.rounds = model, method, rounds
        self.full = self._run(FULL, plain_copy(model))
        self.machine: dict[str, Any] = machine() | {"device": str(like.device)}

    def __call__(self, keeps: Sequence[tuple[int, ...]], *, rounds: int | None = None) -> list[Measurement]:
        """Measure the plain model, which comes first, and these schedules."""
        rounds = rounds or self.rounds
        stage(
            f"measure the speed: {count(len(keeps), 'schedule')} and the full model, {count(rounds, 'round')}"
        )
        runs = {str(i): self._run(str(i), self.reduced(keep)) for i, keep in enumerate(keeps)}
        canary = matmul_canary(self.images.device)
        timings = interleave({FULL: self.full} | runs, rounds=rounds, canary=canary)
        return [self._measurement(timings, name) for name in (FULL, *runs)]

    def reduced(self, keep: tuple[int, ...]) -> nn.Module:
        """A copy of the model, on the same weights, that keeps ``keep`` tokens."""
        return reduce(plain_copy(self.model), self.method, keep=keep)

    def _run(self, name: str, model: nn.Module) -> Run:
        return prepare(Candidate(name, model), self.images, "eager")

    def _measurement(self, timings: Timings, name: str) -> Measurement:
        return Measurement(
            speedup=timings.ratio(name),
            images_per_second=timings.rate(name, len(self.images)),
            latency_ms=quartiles([1000 * seconds for seconds in timings.seconds(name)]),
            quiet=timings.quiet,
        )


def climb(rungs: Sequence[Rung], meter: Speedometer, *, name: str, budget: float) -> tuple[int, Measurement]:
    """The index of the rung that meets a speed-up or latency closely, and its measurement.

    A short probe of a few rungs relates log score to log multiply-adds. The rung predicted to meet the
    budget is then measured in full and corrects the prediction, until a rung meets the budget closely.
    """
    plain, probes = _probe(rungs, meter, budget if name == "speedup" else 2.0)
    scores = {i: math.log(m.score(name, budget)) for i, m in {0: plain, **probes}.items()}
    if scores[0] >= 0:
        return 0, plain
    last = len(rungs) - 1
    met: dict[int, Measurement] = {}
    for attempt in range(ATTEMPTS):
        # aiming too high loses tokens, too low misses the budget: raise the aim a little with every attempt
        index = _predict(rungs, scores, aim=MARGIN * (1 + attempt))
        if index in met:
            break
        found = meter([rungs[index].keep])[1]
        scores[index] = math.log(found.score(name, budget))
        if scores[index] >= 0:
            met[index] = found
            if scores[index] <= SLACK:
                break
        elif index == last:
            raise _out_of_reach(name, budget, found, meter, rungs[last])
    if not met:
        raise _out_of_reach(name, budget, meter([rungs[last].keep])[1], meter, rungs[last])
    best = min(met)
    return best, met[best]


def _probe(
    rungs: Sequence[Rung], meter: Speedometer, speedup: float
) -> tuple[Measurement, dict[int, Measurement]]:
    """Short measurements of the plain model and of rungs, by index, around a speed-up."""
    costs = [rungs[0].macs / wanted for wanted in (speedup, 1.5 * speedup)]
    last = len(rungs) - 1
    chosen = sorted(
        {next((i for i, r in enumerate(rungs) if r.macs <= cost), last) for cost in costs} | {last}
    )
    plain, *found = meter([rungs[i].keep for i in chosen], rounds=PROBE_ROUNDS)
    return plain, dict(zip(chosen, found, strict=True))


def _predict(rungs: Sequence[Rung], scores: dict[int, float], *, aim: float) -> int:
    """The first rung whose log score reaches ``aim``, interpolated over log multiply-adds."""
    for low, high in pairwise(sorted(scores)):
        if scores[high] < aim:
            continue
        start, end = math.log(rungs[low].macs), math.log(rungs[high].macs)
        for i in range(low + 1, high + 1):
            part = (math.log(rungs[i].macs) - start) / (end - start)
            if scores[low] + part * (scores[high] - scores[low]) >= aim:
                return i
    return len(rungs) - 1


def _out_of_reach(name: str, budget: float, found: Measurement, meter: Speedometer, rung: Rung) -> UserError:
    limit = f"at most {found.speedup.median:.2f}"
    if name == "latency_ms":
        limit = f"at least {found.latency_ms.median:.3g}"
    return UserError(
        f"{name}={budget:g} is out of reach: on this machine, in batches of {len(meter.images)}, the fastest "
        f"schedule of {meter.method} (keep={list(rung.keep)}) reaches {limit}; give that, or another method"
    )
