"""From a budget to a schedule: multiply-adds by the formula, speed by measuring on this machine."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from visualtokens.bench import Spread, Timings, interleave, machine, matmul_canary
from visualtokens.bench.comparison import Candidate, Run, prepare
from visualtokens.bench.timing import quartiles
from visualtokens.errors import UserError, unknown
from visualtokens.reduce.blocks import transformer
from visualtokens.reduce.reduction import METHODS, Method, reduce, restore
from visualtokens.reduce.schedule import macs

if TYPE_CHECKING:
    from visualtokens.bench import Spread


# Schedules for every budget, from the whole model down to its class token.
#
# Without fine-tuning the early blocks are the ones that bear pooling least, and what hurts most is to end
# with very few tokens. So the first quarter of the blocks keeps everything and the others all keep the same
# share of what they get; where that would leave less than a thirteenth in the end, pooling starts a block
# earlier.

FEWEST = 1 / 13  # of the patches, as long as pooling can start earlier
STEPS = 60  # shares that are tried for each start


@dataclass(frozen=True)
class Rung:
    """A schedule and what it costs."""

    keep: tuple[int, ...]  # tokens left after each block
    macs: int  # of one image


def twin(model: nn.Module) -> nn.Module:
    """The plain model once more, on the same weights: reducing one leaves the other as it is."""
    shared = {id(weight): weight for weight in chain(model.parameters(), model.buffers())}
    other: nn.Module = copy.deepcopy(model, shared)
    return restore(other) if "reduction" in transformer(other).__dict__ else other


def own_size(model: nn.Module) -> tuple[int, int]:
    """The size of the images (H, W) that the model was made for."""
    vit: Any = transformer(model)
    height, width = vit.patch_embed.img_size
    return height, width


def ladder(model: nn.Module, method: Method, *, size: tuple[int, int]) -> list[Rung]:
    """Schedules for images of ``size`` in falling order of their multiply-adds, the whole model first."""
    other = twin(model)
    vit: Any = transformer(other)
    patches = math.prod(vit.patch_embed.dynamic_feat_size(size))
    fewest = 0 if vit.global_pool == "token" and vit.num_prefix_tokens else 1
    rungs: list[Rung] = []
    for keep in _schedules(len(vit.blocks), patches, fewest):
        reduce(other, method, keep=keep)
        tokens = vit.reduction.schedule.tokens(patches)  # of `conv`, not those that were asked for
        cost = macs(other, patches=patches).total
        if not rungs or cost < rungs[-1].macs:
            rungs.append(Rung(tokens, cost))
    return rungs


def _schedules(blocks: int, patches: int, fewest: int) -> Iterator[tuple[int, ...]]:
    yield (patches,) * blocks
    for whole in range(blocks // 4, -1, -1):
        lowest, steps = (FEWEST, STEPS) if whole else (1e-9, 3 * STEPS)
        for step in range(1, steps + 1):
            yield steady(lowest ** (step / steps), blocks, patches, whole=whole, fewest=fewest)
    yield (fewest,) * blocks


def steady(share: float, blocks: int, patches: int, *, whole: int = 0, fewest: int = 0) -> tuple[int, ...]:
    """``whole`` blocks keep all patches; then every block keeps an equal share, ``share`` in the end."""
    left = (share ** ((i + 1) / (blocks - whole)) for i in range(blocks - whole))
    return (patches,) * whole + tuple(max(fewest, math.ceil(patches * part - 1e-9)) for part in left)


# How fast schedules are on this machine, and which is the first that is fast enough.

FULL = "full"
ATTEMPTS = 6
MARGIN = 0.01  # aim so much above the target
SLACK = 0.04  # above the target is near enough
GLANCES = 2  # rounds of a first look


@dataclass(frozen=True)
class Measured:
    """One schedule beside the whole model."""

    speedup: Spread
    images_per_second: Spread
    latency_ms: Spread
    quiet: bool

    def score(self, name: str, budget: float) -> float:
        """By which factor the budget is met; below 1 it is not."""
        return self.speedup.median / budget if name == "speedup" else budget / self.latency_ms.median


class Speedometer:
    """Measures schedules of a model side by side with the model as it is."""

    def __init__(
        self, model: nn.Module, *, method: Method, size: tuple[int, int], batch: int, rounds: int
    ) -> None:
        like = next(model.parameters())
        channels: int = next(m for m in model.modules() if isinstance(m, nn.Conv2d)).in_channels
        noise = torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(0))
        self.images = noise.to(like.device, like.dtype)
        self.model, self.method, self.rounds = model, method, rounds
        self.full = self._run(FULL, twin(model))
        self.machine: dict[str, Any] = machine() | {"device": str(like.device)}

    def __call__(self, keeps: Sequence[tuple[int, ...]], *, rounds: int | None = None) -> list[Measured]:
        """Measure schedules; the first of the candidates is always the whole model."""
        runs = {str(i): self._run(str(i), self.reduced(keep)) for i, keep in enumerate(keeps)}
        canary = matmul_canary(self.images.device)
        timings = interleave({FULL: self.full} | runs, rounds=rounds or self.rounds, canary=canary)
        return [self._measured(timings, name) for name in (FULL, *runs)]

    def reduced(self, keep: tuple[int, ...]) -> nn.Module:
        return reduce(twin(self.model), self.method, keep=keep)

    def _run(self, name: str, model: nn.Module) -> Run:
        return prepare(Candidate(name, model), self.images, "eager")

    def _measured(self, timings: Timings, name: str) -> Measured:
        return Measured(
            speedup=timings.ratio(name),
            images_per_second=timings.rate(name, len(self.images)),
            latency_ms=quartiles([1000 * seconds for seconds in timings.seconds(name)]),
            quiet=timings.quiet,
        )


def climb(rungs: Sequence[Rung], meter: Speedometer, *, name: str, budget: float) -> tuple[int, Measured]:
    """The rung that meets a speed-up or a latency, found by measuring, and what was measured there.

    A look at a few rungs gives the line of speed over multiply-adds. Then the rung that this line promises
    is measured in full, and the line corrected by it, until a rung meets the budget closely.
    """
    whole, *looks = _look(rungs, meter, budget if name == "speedup" else 2.0)
    known = {i: math.log(m.score(name, budget)) for i, m in [(0, whole), *looks]}
    if known[0] >= 0:
        return 0, whole
    last = len(rungs) - 1
    met: dict[int, Measured] = {}
    for attempt in range(ATTEMPTS):
        # A rung too far down costs tokens, one too far up fails: the aim rises a little with every attempt.
        index = _promising(rungs, known, aim=MARGIN * (1 + attempt))
        if index in met:
            break
        found = meter([rungs[index].keep])[1]
        known[index] = math.log(found.score(name, budget))
        if known[index] >= 0:
            met[index] = found
            if known[index] <= SLACK:
                break
        elif index == last:
            raise _refusal(name, budget, found, meter, rungs[last])
    if not met:
        raise _refusal(name, budget, meter([rungs[last].keep])[1], meter, rungs[last])
    best = min(met)
    return best, met[best]


def _look(rungs: Sequence[Rung], meter: Speedometer, target: float) -> Any:
    """The whole model, and pairs of a rung and what a short measurement says."""
    costs = [rungs[0].macs / wish for wish in (target, 1.5 * target)]
    chosen = {next((i for i, r in enumerate(rungs) if r.macs <= cost), len(rungs) - 1) for cost in costs}
    order = sorted(chosen | {len(rungs) - 1})
    whole, *found = meter([rungs[i].keep for i in order], rounds=GLANCES)
    return [whole, *zip(order, found, strict=True)]


def _promising(rungs: Sequence[Rung], known: dict[int, float], *, aim: float) -> int:
    """The first rung whose score, interpolated between known ones over log multiply-adds, reaches the aim."""
    order = sorted(known)
    for low, high in pairwise(order):
        if known[high] < aim:
            continue
        start, end = math.log(rungs[low].macs), math.log(rungs[high].macs)
        for i in range(low + 1, high + 1):
            part = (math.log(rungs[i].macs) - start) / (end - start)
            if known[low] + part * (known[high] - known[low]) >= aim:
                return i
    return len(rungs) - 1


def _refusal(name: str, budget: float, found: Measured, meter: Speedometer, rung: Rung) -> UserError:
    limit = f"at most {found.speedup.median:.2f}"
    if name == "latency_ms":
        limit = f"at least {found.latency_ms.median:.3g}"
    batch = len(meter.images)
    return UserError(
        f"{name}={budget:g} is out of reach: on this machine, in batches of {batch}, the fastest schedule of "
        f"{meter.method} (keep={list(rung.keep)}) allows {limit}; give that, or another method"
    )


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
    default 8, for latency 1). The schedules are those of :mod:`visualtokens.tune.planning`. A budget that
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
