"""Models side by side: speed, memory, cost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from visualtokens.bench.candidates import Candidate, Mode, collect, prepare
from visualtokens.bench.hardware import machine
from visualtokens.bench.macs import count_macs, count_parameters
from visualtokens.bench.memory import peak_memory
from visualtokens.bench.stats import Spread, Word
from visualtokens.bench.table import text_table
from visualtokens.bench.timing import MIN_SECONDS, Timings, interleave, matmul_canary
from visualtokens.errors import UserError


@dataclass(frozen=True)
class ComparisonRow:
    """One candidate. What does not exist for a plain function is None."""

    name: str
    parameters: int | None
    macs: int | None  # of one image
    images_per_second: Spread  # median and interquartile range over the rounds
    peak_bytes: int  # above weights and input, for the whole batch
    ratio: Spread  # speed against the first row, paired by round; see Timings.ratio
    word: Word | None  # None for the first row


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` measured, and under which conditions."""

    rows: tuple[ComparisonRow, ...]
    size: tuple[int, int]
    batch: int
    mode: Mode
    rounds: int
    machine: dict[str, Any]
    tolerance: float  # how much slower than its best a turn's canary may be
    discarded: int  # turns thrown away because the machine was busy
    noisy: int  # turns kept although it was busy, because it never got quiet

    def table(self) -> str:
        """The comparison as text, at most 100 columns wide."""
        return text_table(self)

    def to_dict(self) -> dict[str, Any]:
        """The same, ready for JSON."""
        return asdict(self) | {"quiet": self.noisy == 0}


def compare(
    models: Sequence[str | Candidate],
    *,
    against: Sequence[str | Candidate] = (),
    size: tuple[int, int] = (224, 224),
    batch: int = 8,
    mode: Mode = "eager",
    rounds: int = 7,
    min_seconds: float = MIN_SECONDS,
    threads: int | None = None,
    device: torch.device | str = "cpu",
) -> Comparison:
    """Measure models side by side on random images; every row is compared with the first of ``models``.

    ``models`` and ``against`` hold names of this library or of timm, or a :class:`Candidate`; weights
    are random. ``mode``: ``"eager"``, ``"channels_last"`` and ``"compile"`` (inductor; compiling is done
    before the clock starts) are forward passes in evaluation and inference mode; ``"train"`` is forward
    and backward in training mode, without an optimizer. Every model has one turn of about
    ``min_seconds`` in each of the ``rounds``; see :func:`~visualtokens.bench.interleave` for how a busy
    machine is dealt with. ``threads`` is the number of threads of torch, restored afterwards; None
    leaves it as it is.
    """
    if min(*size, batch) < 1:
        raise UserError(f"cannot measure {batch} images of {size[0]}×{size[1]}; give sizes of 1 or more")
    device = torch.device(device)
    room = _room_to_compile(len(models) + len(against)) if mode == "compile" else contextlib.nullcontext()
    with _threads(threads), torch.random.fork_rng(), room:
        torch.manual_seed(0)
        candidates = collect([*models, *against], size)
        images = torch.randn(batch, 3, *size, device=device)
        costs = {c.name: _cost(c, size) for c in candidates}
        runs = {c.name: prepare(c, images, mode) for c in candidates}
        for run in runs.values():
            run()  # compiles, and makes what a library makes only once
        timings = interleave(runs, rounds=rounds, min_seconds=min_seconds, canary=matmul_canary(device))
        # Only now: what the profiler leaves on the heap changes how fast memory is had from then on.
        peaks = {name: peak_memory(run, device=device) for name, run in runs.items()}
        here = machine()
    return Comparison(
        rows=tuple(_row(name, batch, timings, *costs[name], peaks[name]) for name in runs),
        size=size,
        batch=batch,
        mode=mode,
        rounds=rounds,
        machine=here | {"device": str(device)},
        tolerance=timings.tolerance,
        discarded=timings.discarded,
        noisy=timings.noisy,
    )


def _cost(candidate: Candidate, size: tuple[int, int]) -> tuple[int | None, int | None]:
    if not isinstance(candidate.model, nn.Module):
        return None, None
    return count_parameters(candidate.model), count_macs(candidate.model, size)


def _row(
    name: str, batch: int, timings: Timings, parameters: int | None, macs: int | None, peak: int
) -> ComparisonRow:
    return ComparisonRow(
        name=name,
        parameters=parameters,
        macs=macs,
        images_per_second=timings.rate(name, batch),
        peak_bytes=peak,
        ratio=timings.ratio(name),
        word=None if name == timings.names[0] else timings.word(name),
    )


@contextlib.contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    if threads is not None and threads < 1:
        raise UserError(f"threads={threads} is not a number of threads; give 1 or more")
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _room_to_compile(candidates: int) -> Iterator[None]:
    """Models of one class share one cache of compiled code; beyond its limit they would run uncompiled."""
    config = torch._dynamo.config
    with config.patch(recompile_limit=max(config.recompile_limit, 2 * candidates)):
        yield
