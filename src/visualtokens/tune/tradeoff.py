"""Cost, speed, memory and quality of several schedules of one model: a table and a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visualtokens.bench import Spread, peak_memory
from visualtokens.bench.comparison import align
from visualtokens.errors import UserError
from visualtokens.files import write_atomically
from visualtokens.modes import eval_mode
from visualtokens.progress import count, track
from visualtokens.reduce.encoder import first_tensor
from visualtokens.reduce.families import encoder_of
from visualtokens.reduce.methods import DEFAULT_METHOD
from visualtokens.reduce.schedule import Keep, Schedule, macs
from visualtokens.tune.calibration import plain_copy
from visualtokens.tune.planning import FULL, Speedometer, input_size, ladder

Quality = Literal["accuracy", "agreement", "similarity"]
MEANING: dict[Quality, str] = {
    "accuracy": "share of the images with the correct label",
    "agreement": "share of the images with the same prediction as the full model",
    "similarity": "mean cosine similarity to the features of the full model",
}


@dataclass(frozen=True)
class Row:
    """One schedule; the first row of a table is the full model."""

    name: str
    keep: tuple[int, ...]
    macs: int  # of one image
    images_per_second: Spread  # median and interquartile range
    latency_ms: Spread  # of one call
    peak_bytes: int  # above weights and input, for the whole batch
    speedup: Spread  # over the full model, paired by round
    quality: float | None


@dataclass(frozen=True)
class Tradeoff:
    """The result of :func:`tradeoff`, and the conditions of the measurement."""

    rows: tuple[Row, ...]
    method: str
    size: tuple[int, int]
    batch: int
    quality: Quality | None
    evaluated: int  # images that the quality was computed on
    quiet: bool
    machine: dict[str, Any]

    def table(self) -> str:
        """The rows as text, at most 100 columns wide."""
        m, (height, width) = self.machine, self.size
        header = ("schedule", "tokens", "GMACs", "images/s", "peak MB", "speed", self.quality or "")
        lines = [
            f"{m['cpu']}, {count(m['cores'], 'core')}, {count(m['threads'], 'thread')}, torch {m['torch']}",
            f"{self.method}, {self.batch} images of {height}×{width}, forward, eager",
            "",
            *align([header, *map(_cells, self.rows)]),
            "",
            "tokens: mean over the blocks → after the last. images/s: median ± half the interquartile range.",
            "peak: above weights and input. speed: relative to the full model, paired by round.",
        ]
        if self.quality:
            lines.append(f"{self.quality}: {MEANING[self.quality]}, of {self.evaluated}.")
        if not self.quiet:
            lines.append("THE MACHINE WAS NEVER QUIET: do not trust small differences.")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The result as plain types, for JSON."""
        return asdict(self)

    def save(self, path: str | Path) -> Path:
        """Plot quality, or else speed, over the cost and save it as .png, .svg or .pdf."""
        return _plot(self, Path(path))


def tradeoff(
    model: nn.Module,
    schedules: Mapping[str, Keep],
    *,
    method: str = DEFAULT_METHOD,
    images: Tensor | None = None,
    labels: Tensor | None = None,
    size: tuple[int, int] | None = None,
    batch: int = 8,
    rounds: int = 5,
    options: Mapping[str, Any] | None = None,
) -> Tradeoff:
    """Measure the named ``schedules`` side by side with the full model. ``model`` is not changed.

    Speed and memory are measured on random images of ``size`` (H, W), by default the model's own, in batches
    of ``batch``. Quality needs preprocessed ``images (n, 3, H, W)``: it is the accuracy if ``labels (n,)``
    are given; otherwise the agreement with the full model, or, for a model without classes, the similarity
    of its features. ``options`` are further arguments of ``reduce``: ``init`` and ``iterations``.
    """
    if FULL in schedules:
        raise UserError(f"{FULL!r} is the name of the full model; give the schedule another name")
    encoder = encoder_of(model)
    size = size or input_size(model)
    patches = math.prod(encoder.grid(size))
    blocks = len(encoder.blocks)
    keeps = {name: Schedule.of(keep, blocks).tokens(patches) for name, keep in schedules.items()}
    meter = Speedometer(model, method=method, size=size, batch=batch, rounds=rounds, options=options)
    measured = meter(list(keeps.values()))
    models = [plain_copy(model), *(meter.reduced(keep) for keep in keeps.values())]
    quality, values = _evaluate(models, images, labels, batch=batch)
    rows = tuple(
        Row(
            name=name,
            keep=keep,
            macs=macs(each, patches=patches).total,
            images_per_second=speed.images_per_second,
            latency_ms=speed.latency_ms,
            peak_bytes=_peak(each, meter.images),
            speedup=speed.speedup,
            quality=value,
        )
        for (name, keep), each, speed, value in zip(
            ({FULL: (patches,) * blocks} | keeps).items(), models, measured, values, strict=True
        )
    )
    return Tradeoff(
        rows=rows,
        method=method,
        size=size,
        batch=batch,
        quality=quality,
        evaluated=0 if images is None else len(images),
        quiet=all(speed.quiet for speed in measured),
        machine=meter.machine,
    )


def spread_schedules(
    model: nn.Module,
    method: str,
    *,
    size: tuple[int, int] | None = None,
    shares: Sequence[float],
    options: Mapping[str, Any] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Schedules, by name, that take at most these ``shares`` of the full model's multiply-adds."""
    rungs = ladder(model, method, size=size or input_size(model), options=options)
    found: dict[str, tuple[int, ...]] = {}
    for share in shares:
        rung = next((rung for rung in rungs if rung.macs <= share * rungs[0].macs), None)
        if rung is not None and rung.keep not in found.values():
            found[f"{share:.0%} of MACs"] = rung.keep
    return found


def _evaluate(
    models: Sequence[nn.Module], images: Tensor | None, labels: Tensor | None, *, batch: int
) -> tuple[Quality | None, list[float | None]]:
    """The kind of quality and its value for each model; the first is the full model."""
    if images is None:
        return None, [None] * len(models)
    tracked = track(models, "evaluate", unit="schedule", images=lambda _: len(images))
    outputs = (_outputs(model, images, batch=batch) for model in tracked)
    if labels is not None:
        return "accuracy", [(out.argmax(1) == labels).float().mean().item() for out in outputs]
    full, *others = outputs
    if encoder_of(models[0]).classes:
        labels = full.argmax(1)
        return "agreement", [1.0, *((out.argmax(1) == labels).float().mean().item() for out in others)]
    return "similarity", [1.0, *(F.cosine_similarity(out, full).mean().item() for out in others)]


@torch.inference_mode()
def _outputs(model: nn.Module, images: Tensor, *, batch: int) -> Tensor:
    """Logits or features ``(n, ·)`` of ``images (n, 3, H, W)`` in evaluation mode, on the CPU."""
    like = next(model.parameters())
    with eval_mode(model):
        return torch.cat([first_tensor(model(part.to(like))).float().cpu() for part in images.split(batch)])


def _peak(model: nn.Module, images: Tensor) -> int:
    def run() -> None:
        with eval_mode(model), torch.inference_mode():
            model(images)

    run()  # one-time allocations do not count
    return peak_memory(run, device=images.device)


def _cells(row: Row) -> tuple[str, ...]:
    rate, speed = row.images_per_second, row.speedup
    digits = 1 if rate.median < 1000 else 0
    return (
        row.name,
        f"{sum(row.keep) / len(row.keep):.0f} → {row.keep[-1]}",
        f"{row.macs / 1e9:.3f}",
        f"{rate.median:.{digits}f} ±{rate.half:.{digits}f}",
        f"{row.peak_bytes / 1e6:.1f}",
        "1" if row.name == FULL else f"{speed.median:.2f} ({speed.low:.2f}–{speed.high:.2f})",
        "" if row.quality is None else f"{row.quality:.1%}",
    )


FORMATS = (".png", ".svg", ".pdf")
TEXT, GREY, LINE = "#1b1c20", "#62656e", "#0b4f8a"


def _plot(found: Tradeoff, path: Path) -> Path:
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"cannot plot to {str(path)!r}; give a name that ends in {', '.join(FORMATS)}")
    from matplotlib.figure import Figure  # not pyplot, which has global state

    cost = [row.macs / 1e9 for row in found.rows]
    speed = [row.images_per_second.median for row in found.rows]
    costs, speeds = "GMACs per image", "images per second"
    if found.quality is None:
        figure = Figure(figsize=(6.4, 4.6), layout="constrained")
        _panel(figure.subplots(), cost, speed, found, xlabel=costs, ylabel=speeds)
    else:
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        quality = [100 * (row.quality or 0.0) for row in found.rows]
        _panel(left, cost, quality, found, xlabel=costs, ylabel=f"{found.quality}, %")
        _panel(right, speed, quality, found, xlabel=speeds, ylabel="")
        left.set(ylim=left.get_ylim(), yticks=[tick for tick in left.get_yticks() if tick <= 100])
    threads = count(found.machine["threads"], "thread")
    figure.suptitle(
        f"{found.method}, images of {found.size[0]}×{found.size[1]}; "
        f"speed in batches of {found.batch}, {threads}"
        + (f", {found.quality} on {found.evaluated} images" if found.quality else ""),
        fontsize=11,
        color=TEXT,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix.lower().removeprefix(".")
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150, format=kind))
    return path


def _panel(ax: Any, x: list[float], y: list[float], found: Tradeoff, *, xlabel: str, ylabel: str) -> None:
    order = sorted(range(len(x)), key=lambda i: found.rows[i].macs)
    ax.plot([x[i] for i in order], [y[i] for i in order], color=LINE, linewidth=2, zorder=2)
    rising = (x[order[-1]] - x[order[0]]) * (y[order[-1]] - y[order[0]]) > 0
    # labels on the side of the points that the line does not cross
    offset = dict(xytext=(-8, 3), ha="right") if rising else dict(xytext=(8, 3), ha="left")
    for i, row in enumerate(found.rows):
        full = row.name == FULL
        face = LINE if full else "white"
        ax.plot(x[i], y[i], "o", color=LINE, markerfacecolor=face, markersize=7, zorder=3)
        label = row.name if full else f"×{row.speedup.median:.1f}"
        point = (x[i], y[i])
        ax.annotate(label, point, textcoords="offset points", fontsize=10, color=TEXT, **offset)
    ax.set_xlabel(xlabel, fontsize=11, color=TEXT)
    ax.set_ylabel(ylabel, fontsize=11, color=TEXT)
    ax.set_xlim(0, 1.15 * max(x))
    ax.margins(y=0.18)
    ax.grid(color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(colors=GREY, labelsize=11)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GREY)
