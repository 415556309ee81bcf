"""Models side by side: speed, memory, cost."""

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
    Word,
    interleave,
    matmul_canary,
    synchronize,
)
from visualtokens.errors import UserError, unknown


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


# What can be compared, and how it is made to run.

Mode = Literal["eager", "channels_last", "compile", "train"]
Run = Callable[[], object]


@dataclass(frozen=True)
class Candidate:
    """Something to compare under a name: a model, or any function of a batch of images."""

    name: str
    model: Callable[[Tensor], object]


def collect(candidates: Sequence[str | Candidate], size: tuple[int, int]) -> list[Candidate]:
    """The candidates, models given by name built for images of ``size``. Nobody else's model is touched."""
    if not candidates:
        raise UserError("there is nothing to compare; give at least one model")
    names = [c if isinstance(c, str) else c.name for c in candidates]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name!r} is given {names.count(name)} times; give every candidate its own name")
    return [Candidate(c, build(c, size)) if isinstance(c, str) else _own(c) for c in candidates]


def build(name: str, size: tuple[int, int]) -> nn.Module:
    """The untrained model of that name, ours or timm's, for images of ``size``."""
    if ":" in name:  # a folder or a repository (local-dir:run, hf-hub:…), which only timm can look into
        return timm.create_model(name)
    if not timm.is_model(name):
        raise unknown("model", name, timm.list_models())
    config = timm.get_pretrained_cfg(name)
    if config.fixed_input_size and tuple(config.input_size[1:]) != tuple(size):
        return timm.create_model(name, img_size=size)
    return timm.create_model(name)


def _own(candidate: Candidate) -> Candidate:
    """A copy of a given model: training would leave gradients and statistics in the original."""
    if isinstance(candidate.model, nn.Module):
        return Candidate(candidate.name, copy.deepcopy(candidate.model))
    return candidate


def prepare(candidate: Candidate, images: Tensor, mode: Mode) -> Run:
    """A function that runs the candidate once on the images and waits until it is done."""
    if mode not in get_args(Mode):
        raise unknown("mode", mode, get_args(Mode))
    model = candidate.model
    if isinstance(model, nn.Module):
        model.to(images.device).train(mode == "train")
    if mode == "train":
        return _training(candidate, images)
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


def _training(candidate: Candidate, images: Tensor) -> Run:
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
        model.zero_grad(set_to_none=True)  # so that every run starts with the weights alone
        synchronize(images.device)
        return None

    return run


# A comparison as text.

WIDTH = 100
COLUMNS = ("model", "Mparams", "GMACs", "images/s", "peak MB", "speed", "")
MODES = {
    "eager": "forward, eager",
    "channels_last": "forward, eager, channels last",
    "compile": "forward, compiled by inductor (compile time not included)",
    "train": "forward and backward in training mode, no optimizer",
}


def text_table(comparison: Comparison) -> str:
    """Two header lines, one line per candidate, what the columns mean, and whether to trust it."""
    cells = [COLUMNS, *(_cells(row) for row in comparison.rows)]
    lines = [*_header(comparison), "", *align(cells), "", *_legend(comparison)]
    return "\n".join(lines)


def align(cells: Sequence[Sequence[str]], *, width: int = WIDTH) -> list[str]:
    """Columns under each other: the first to the left, the last as it is, the others to the right.

    One string per row. A first cell that would make its row longer than ``width`` stands on a line of
    its own above the rest of the row.
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
        f"{chip}, {m['cores']} cores, {m['threads']} threads, torch {m['torch']}",
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
        "1" if row.word is None else f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})",
        row.word or "reference",
    )


def _legend(comparison: Comparison) -> list[str]:
    first, turns = comparison.rows[0].name, len(comparison.rows) * comparison.rounds
    interval = "95 % interval" if comparison.rounds >= MIN_ROUNDS else "whole range"
    lines = [
        "images/s: median over the rounds ± half the interquartile range. peak: above weights and input.",
        f"speed: against {first}, paired by round: the median (and its {interval}).",
    ]
    if comparison.discarded:
        lines.append(
            f"{comparison.discarded} turns were repeated: beside them a matrix product took "
            f"{comparison.tolerance:.0%} longer than its best, or more."
        )
    if comparison.noisy:
        lines.append(
            f"THE MACHINE WAS NEVER QUIET: {comparison.noisy} of {turns} turns are disturbed; "
            "do not trust small differences."
        )
    return lines
