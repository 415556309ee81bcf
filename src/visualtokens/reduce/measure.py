"""How fast schedules are on this machine, and which is the first that is fast enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from visualtokens.bench import Spread, Timings, interleave, machine, matmul_canary
from visualtokens.bench.candidates import Candidate, Run, prepare
from visualtokens.bench.stats import quartiles
from visualtokens.errors import UserError
from visualtokens.reduce.ladder import Rung, twin
from visualtokens.reduce.reduction import Method, reduce

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
