"""Find the schedule that meets a budget of multiply-adds, speed-up or latency.

:func:`ladder` lists schedules by cost, :class:`Speedometer` measures them on this machine, and :func:`plan`
returns the one that keeps most tokens within the budget.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visualtokens.bench import Spread, Timings, interleave, machine, matmul_canary
from visualtokens.bench.comparison import Candidate, Run, prepare
from visualtokens.bench.timing import quartiles
from visualtokens.errors import UserError, unknown
from visualtokens.files import json_ready, write_atomically
from visualtokens.progress import count, stage
from visualtokens.reduce.families import encoder_of
from visualtokens.reduce.methods import DEFAULT_METHOD, METHODS, find_method
from visualtokens.reduce.reduction import reduce
from visualtokens.reduce.schedule import macs as formula_macs
from visualtokens.tune.calibration import Profile, calibrate, default_profile, plain_copy

STEPS = 400  # schedules between the plain model and the last
SCALES = (0.01, 100.0)  # of the drop rates, from the first of these schedules to the last
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
    patches: int  # of such an image
    macs: int  # of one image
    full_macs: int  # of the plain model
    rates: tuple[float, ...] | None = None  # relative drop rates of the blocks, if they were calibrated
    calibrated_on: int | None = None  # images
    batch: int | None = None  # images per call in the measurement
    speedup: Spread | None = None  # over the plain model, paired by round: median and its interval
    images_per_second: Spread | None = None  # median and interquartile range
    latency_ms: Spread | None = None  # of one call
    quiet: bool | None = None  # whether the machine was undisturbed
    machine: dict[str, Any] | None = None

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON, for ``reduce(model, plan.method, keep="plan.json")``."""
        file = Path(path)
        text = json.dumps(json_ready(asdict(self)), indent=2)
        write_atomically(file, lambda temporary: temporary.write_text(text + "\n", encoding="utf-8"))
        return file


def plan(
    model: nn.Module,
    *,
    macs: float | None = None,
    speedup: float | None = None,
    latency_ms: float | None = None,
    images: Tensor | None = None,
    method: str = DEFAULT_METHOD,
    size: tuple[int, int] | None = None,
    batch: int | None = None,
    rounds: int = 5,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
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

    ``images (n, 3, H, W)``, preprocessed and unlabelled, decide which blocks drop how many tokens: see
    :func:`visualtokens.tune.calibration.calibrate`, which calls ``progress`` with the batches done and their
    number. 64 images take minutes for a ViT-B on two cores. Without them the default drop rates are used.
    ``options`` are further arguments of ``reduce``: ``init`` and ``iterations``.
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
    profile = None
    if images is not None:
        size = (images.shape[2], images.shape[3])
        share = _expected_share(model, name, budget, size)
        profile = calibrate(model, images, share=share, method=method, progress=progress).profile
    rungs = ladder(model, method, size=size, profile=profile, options=options)
    about: dict[str, Any] = dict(
        method=method,
        size=size,
        patches=rungs[0].keep[0],
        full_macs=rungs[0].macs,
        rates=None if profile is None else profile.rates,
        calibrated_on=None if images is None else len(images),
    )
    if name == "macs":
        rung = _first_within(rungs, budget, method)
        return Plan(keep=rung.keep, macs=rung.macs, **about)
    batch = batch or (1 if name == "latency_ms" else 8)
    meter = Speedometer(model, method=method, size=size, batch=batch, rounds=rounds, options=options)
    index, found = climb(rungs, meter, name=name, budget=budget)
    return Plan(
        keep=rungs[index].keep,
        macs=rungs[index].macs,
        **about,
        batch=batch,
        speedup=found.speedup,
        images_per_second=found.images_per_second,
        latency_ms=found.latency_ms,
        quiet=found.quiet,
        machine=meter.machine,
    )


def _expected_share(model: nn.Module, name: str, budget: float, size: tuple[int, int]) -> float:
    """The share of the multiply-adds at which drop rates are calibrated for a budget."""
    if name == "latency_ms":
        return 0.5
    if name == "speedup":
        return min(0.9, max(0.2, 0.9 / budget))  # clustering takes time as well
    plain = plain_copy(model)
    full = formula_macs(plain, patches=math.prod(encoder_of(plain).grid(size))).total
    return min(0.9, max(0.2, budget if budget <= 1 else budget / full))


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


def ladder(
    model: nn.Module,
    method: str,
    *,
    size: tuple[int, int],
    profile: Profile | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[Rung]:
    """Schedules for images of ``size`` (H, W) in decreasing order of multiply-adds, the plain model first.

    They scale the drop rates of ``profile``, by default :func:`default_profile`. ``options`` are further
    arguments of ``reduce``.
    """
    options = options or {}
    plain = plain_copy(model)
    encoder = encoder_of(plain)
    blocks, patches = len(encoder.blocks), math.prod(encoder.grid(size))
    fewest = 0 if encoder.reads_prefix_only else 1
    full = formula_macs(plain, patches=patches).total
    reduce(plain, method, keep=[patches] * blocks, **options)
    profile = profile or default_profile(blocks)
    fit = find_method(method)[1]
    rungs = [Rung((patches,) * blocks, full)]
    for keep in _schedules(profile, patches, fewest):
        if fit is not None:  # conv cannot reach every K, and only halves the grid where it was told to
            keep = fit(keep, encoder.grid(size))
            reduce(plain, method, keep=keep, **options)
        cost = formula_macs(plain, patches=patches, keep=keep).total
        if cost < rungs[-1].macs:
            rungs.append(Rung(keep, cost))
    return rungs


def _schedules(profile: Profile, patches: int, fewest: int) -> Iterator[tuple[int, ...]]:
    low, high = SCALES
    for step in range(STEPS):
        yield profile.keep(low * (high / low) ** (step / (STEPS - 1)), patches, fewest=fewest)
    yield (fewest,) * len(profile.rates)


def input_size(model: nn.Module) -> tuple[int, int]:
    """The image size (H, W) that the model was created for."""
    return encoder_of(model).image_size


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
        self,
        model: nn.Module,
        *,
        method: str,
        size: tuple[int, int],
        batch: int,
        rounds: int,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        like = next(model.parameters())
        channels: int = next(m for m in model.modules() if isinstance(m, nn.Conv2d)).in_channels
        noise = torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(0))
        self.images = noise.to(like.device, like.dtype)
        self.model, self.method, self.rounds, self.options = model, method, rounds, options or {}
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
        return reduce(plain_copy(self.model), self.method, keep=keep, **self.options)

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
