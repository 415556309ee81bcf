"""Comparison of models: speed, peak memory and cost, measured in one interleaved run."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import timm
import torch
from torch import Tensor, nn

import visualtokens.models  # noqa: F401  registers our models with timm
from visualtokens.bench.macs import count_macs, count_parameters
from visualtokens.bench.memory import machine, peak_memory
from visualtokens.bench.timing import (
    MIN_ROUNDS,
    MIN_SECONDS,
    Spread,
    Timings,
    Verdict,
    interleave,
    is_quiet,
    matmul_canary,
    synchronize,
)
from visualtokens.errors import UserError, unknown
from visualtokens.progress import count

Mode = Literal["eager", "channels_last", "compile", "train"]  # what is measured, and how
Run = Callable[[], object]


@dataclass(frozen=True)
class Candidate:
    """A named candidate: a model, or any function of a batch of images."""

    name: str
    model: Callable[[Tensor], object]


@dataclass(frozen=True)
class ComparisonRow:
    """Results of one candidate. A plain function has no parameters and macs."""

    name: str
    parameters: int | None
    macs: int | None  # per image
    images_per_second: Spread  # median and interquartile range over the rounds
    peak_bytes: int  # above weights and input, for the whole batch
    ratio: Spread  # speed relative to the first row, paired by round; see Timings.ratio
    verdict: Verdict | None  # None for the first row


@dataclass(frozen=True)
class Comparison:
    """Result of :func:`compare`, with the conditions of the measurement."""

    rows: tuple[ComparisonRow, ...]
    size: tuple[int, int]
    batch: int
    mode: Mode
    rounds: int
    machine: dict[str, Any]
    tolerance: float  # how much slower than the best the canary of a turn may be
    discarded: int  # turns repeated because the machine was busy
    noisy: int  # turns kept although the machine was busy
    waiting: float | None = None  # share of the time in which some process waited for a processor

    @property
    def quiet(self) -> bool:
        """Whether no kept turn was disturbed and processes hardly waited for a processor."""
        return is_quiet(self.noisy, self.waiting)

    def table(self) -> str:
        """The comparison as text, at most 100 columns wide."""
        cells = [COLUMNS, *(_cells(row) for row in self.rows)]
        return "\n".join([*_header(self), "", *align(cells), "", *_legend(self)])

    def to_dict(self) -> dict[str, Any]:
        """The comparison as a dictionary, ready for JSON."""
        return asdict(self) | {"quiet": self.quiet}


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

    ``models`` and ``against`` hold names of models of this library or timm, or :class:`Candidate` objects;
    weights are random. ``mode``: ``"eager"``, ``"channels_last"`` and ``"compile"`` (inductor; compilation
    is not timed) are forward passes in evaluation and inference mode; ``"train"`` is forward and backward
    in training mode, without an optimizer. Every model has one turn of about ``min_seconds`` in each of
    the ``rounds``; see :func:`~visualtokens.bench.interleave` for the treatment of a busy machine.
    ``threads`` is the number of torch threads, restored afterwards; None keeps the current number.
    """
    if min(*size, batch) < 1:
        raise UserError(f"cannot measure {batch} images of {size[0]}×{size[1]}; give sizes of 1 or more")
    device = torch.device(device)
    limit = _compile_limit(len(models) + len(against)) if mode == "compile" else contextlib.nullcontext()
    with _threads(threads), torch.random.fork_rng(), limit:
        torch.manual_seed(0)
        candidates = collect([*models, *against], size)
        images = torch.randn(batch, 3, *size, device=device)
        costs = {c.name: _cost(c, size) for c in candidates}
        runs = {c.name: prepare(c, images, mode) for c in candidates}
        for run in runs.values():
            run()  # compiles, and makes one-time allocations
        timings = interleave(runs, rounds=rounds, min_seconds=min_seconds, canary=matmul_canary(device))
        # After the timing: the profiler's allocations change how fast the allocator is from then on.
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
        waiting=timings.waiting,
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
        verdict=None if name == timings.names[0] else timings.verdict(name),
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
def _compile_limit(candidates: int) -> Iterator[None]:
    """Raise dynamo's recompile limit: models of one class share a cache, and run uncompiled beyond it."""
    config = torch._dynamo.config
    with config.patch(recompile_limit=max(config.recompile_limit, 2 * candidates)):
        yield


def collect(candidates: Sequence[str | Candidate], size: tuple[int, int]) -> list[Candidate]:
    """The candidates as :class:`Candidate` objects: names are built for ``size``, given models are copied."""
    if not candidates:
        raise UserError("there is nothing to compare; give at least one model")
    names = [c if isinstance(c, str) else c.name for c in candidates]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name!r} is given {names.count(name)} times; give every candidate its own name")
    return [Candidate(c, build(c, size)) if isinstance(c, str) else _copy(c) for c in candidates]


def build(name: str, size: tuple[int, int]) -> nn.Module:
    """The untrained model of that name, of this library or timm, for images of ``size`` (H, W)."""
    if ":" in name:  # a folder or repository (local-dir:run, hf-hub:…), whose config only timm can read
        return timm.create_model(name)
    if not timm.is_model(name):
        raise unknown("model", name, timm.list_models())
    config = timm.get_pretrained_cfg(name)
    if config.fixed_input_size and tuple(config.input_size[1:]) != tuple(size):
        return timm.create_model(name, img_size=size)
    return timm.create_model(name)


def _copy(candidate: Candidate) -> Candidate:
    """A copy of a given model: training would leave gradients and statistics in the original."""
    if isinstance(candidate.model, nn.Module):
        return Candidate(candidate.name, copy.deepcopy(candidate.model))
    return candidate


def prepare(candidate: Candidate, images: Tensor, mode: Mode) -> Run:
    """A function that runs the candidate once on ``images (B, 3, H, W)`` and waits for the result."""
    if mode not in get_args(Mode):
        raise unknown("mode", mode, get_args(Mode))
    model = candidate.model
    if isinstance(model, nn.Module):
        model.to(images.device).train(mode == "train")
    if mode == "train":
        return _prepare_training(candidate, images)
    if mode == "channels_last":
        images = images.contiguous(memory_format=torch.channels_last)
        if isinstance(model, nn.Module):
            model.to(memory_format=torch.channels_last)
    forward = torch.compile(model, dynamic=False) if mode == "compile" else model

    def run() -> object:
        with torch.inference_mode():
            output = forward(images)
        synchronize(images.device)
        return output

    return run


def _prepare_training(candidate: Candidate, images: Tensor) -> Run:
    """Forward, and backward from the sum of the output; no optimizer."""
    model = candidate.model
    if not isinstance(model, nn.Module):
        raise UserError(f"candidate {candidate.name!r} is a function and cannot train; give an nn.Module")

    def run() -> object:
        output = model(images)
        if not isinstance(output, Tensor):
            raise UserError(
                f"candidate {candidate.name!r} returns {type(output).__name__}; to train, return a Tensor"
            )
        output.sum().backward()
        model.zero_grad(set_to_none=True)  # every run allocates its gradients anew
        synchronize(images.device)
        return None

    return run


WIDTH = 100
COLUMNS = ("model", "Mparams", "GMACs", "images/s", "peak MB", "speed", "")
MODES = {
    "eager": "forward, eager",
    "channels_last": "forward, eager, channels last",
    "compile": "forward, compiled by inductor (compile time not included)",
    "train": "forward and backward in training mode, no optimizer",
}


def align(cells: Sequence[Sequence[str]], *, width: int = WIDTH) -> list[str]:
    """Rows of text with aligned columns: the first and last to the left, the others to the right.

    One string per row. A first cell that would make its row longer than ``width`` gets a line of its own
    above the rest of the row.
    """
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[0] = min(widths[0], width - sum(widths[1:]) - 2 * (len(widths) - 1))
    rows = []
    for first, *middle, last in cells:
        above, first = (f"{first}\n", "") if len(first) > widths[0] else ("", first)
        right = [cell.rjust(w) for cell, w in zip(middle, widths[1:-1], strict=True)]
        rows.append(above + "  ".join([first.ljust(widths[0]), *right, last]).rstrip())
    return rows


def _header(comparison: Comparison) -> list[str]:
    m, (height, width) = comparison.machine, comparison.size
    chip = m["cpu"] if m["device"] == "cpu" else f"{m['gpu']} on {m['cpu']}"
    images = f"{comparison.batch} images of {height}×{width}"
    return [
        f"{chip}, {count(m['cores'], 'core')}, {count(m['threads'], 'thread')}, torch {m['torch']}",
        f"{images}, {MODES[comparison.mode]}, {comparison.rounds} rounds",
    ]


def _cells(row: ComparisonRow) -> tuple[str, ...]:
    rate, ratio = row.images_per_second, row.ratio
    digits = 1 if rate.median < 1000 else 0
    return (
        row.name,
        "–" if row.parameters is None else f"{row.parameters / 1e6:.2f}",
        "–" if row.macs is None else f"{row.macs / 1e9:.3f}",
        f"{rate.median:.{digits}f} ±{rate.half:.{digits}f}",
        f"{row.peak_bytes / 1e6:.1f}",
        "1" if row.verdict is None else f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})",
        row.verdict or "reference",
    )


def _legend(comparison: Comparison) -> list[str]:
    first, turns = comparison.rows[0].name, len(comparison.rows) * comparison.rounds
    interval = "95 % interval" if comparison.rounds >= MIN_ROUNDS else "full range"
    lines = [
        "images/s: median over the rounds ± half the interquartile range. peak: above weights and input.",
        f"speed: relative to {first}, paired by round: median ({interval}).",
    ]
    if comparison.discarded:
        lines.append(
            f"{comparison.discarded} turns were repeated: a matrix product timed next to them took "
            f"{comparison.tolerance:.0%} longer than its best, or more."
        )
    if comparison.noisy:
        lines.append(
            f"THE MACHINE WAS NEVER QUIET: {comparison.noisy} of {turns} turns are disturbed; "
            "do not trust small differences."
        )
    elif not comparison.quiet:
        lines.append(
            f"THE MACHINE WAS NEVER QUIET: no core was free {comparison.waiting:.0%} of the time; "
            "do not trust small differences."
        )
    return lines
