"""What fewer tokens cost and what they save, side by side: the table and the curve."""

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
from visualtokens.reduce.blocks import transformer
from visualtokens.reduce.reduction import Method
from visualtokens.reduce.schedule import Keep, Schedule, macs
from visualtokens.tune.planning import FULL, Speedometer, ladder, own_size, twin

Quality = Literal["accuracy", "agreement", "similarity"]
MEANING: dict[Quality, str] = {
    "accuracy": "share of the images with the right label",
    "agreement": "share of the images that get the same label as by the whole model",
    "similarity": "mean cosine between the features and those of the whole model",
}


@dataclass(frozen=True)
class Row:
    """One schedule; the first row of a table is the whole model."""

    name: str
    keep: tuple[int, ...]
    macs: int  # of one image
    images_per_second: Spread  # median and interquartile range
    latency_ms: Spread  # of one call
    peak_bytes: int  # above weights and input, for the whole batch
    speedup: Spread  # against the whole model, paired by round
    quality: float | None


@dataclass(frozen=True)
class Tradeoff:
    """What :func:`tradeoff` found, and under which conditions."""

    rows: tuple[Row, ...]
    method: str
    size: tuple[int, int]
    batch: int
    quality: Quality | None
    judged: int  # images behind the quality
    quiet: bool
    machine: dict[str, Any]

    def table(self) -> str:
        """As text, at most 100 columns wide."""
        m, (height, width) = self.machine, self.size
        header = ("schedule", "tokens", "GMACs", "images/s", "peak MB", "speed", self.quality or "")
        lines = [
            f"{m['cpu']}, {m['cores']} cores, {m['threads']} threads, torch {m['torch']}",
            f"{self.method}, {self.batch} images of {height}×{width}, forward, eager",
            "",
            *align([header, *map(_cells, self.rows)]),
            "",
            "tokens: mean of the blocks → behind the last. images/s: median ± half the interquartile range.",
            "peak: above weights and input. speed: against the whole model, paired by round.",
        ]
        if self.quality:
            lines.append(f"{self.quality}: {MEANING[self.quality]}, of {self.judged}.")
        if not self.quiet:
            lines.append("THE MACHINE WAS NEVER QUIET: do not trust small differences.")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    def save(self, path: str | Path) -> Path:
        """Draw the curve as a picture (.png, .svg or .pdf)."""

        return draw(self, Path(path))


def tradeoff(
    model: nn.Module,
    schedules: Mapping[str, Keep],
    *,
    method: Method = "weighted_kmedoids",
    images: Tensor | None = None,
    labels: Tensor | None = None,
    size: tuple[int, int] | None = None,
    batch: int = 8,
    rounds: int = 5,
) -> Tradeoff:
    """Measure the schedules, by name, beside the whole model. Leaves ``model`` as it is.

    Speed and memory are those of random images of ``size`` (H, W), by default the model's own, in ``batch``.
    With ``images (n, 3, H, W)``, prepared for the model, there is a column of quality: the accuracy if there
    are ``labels (n,)``; else the agreement with the whole model, which for a model without classes is the
    similarity of the features.
    """
    if FULL in schedules:
        raise UserError(f"{FULL!r} is the name of the whole model; give the schedule another one")
    vit: Any = transformer(model)
    size = size or own_size(model)
    patches = math.prod(vit.patch_embed.dynamic_feat_size(size))
    blocks = len(vit.blocks)
    keeps = {name: Schedule.of(keep, blocks).tokens(patches) for name, keep in schedules.items()}
    meter = Speedometer(model, method=method, size=size, batch=batch, rounds=rounds)
    measured = meter(list(keeps.values()))
    models = [twin(model), *(meter.reduced(keep) for keep in keeps.values())]
    kind, values = _judge(models, images, labels, batch=batch)
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
        quality=kind,
        judged=0 if images is None else len(images),
        quiet=all(speed.quiet for speed in measured),
        machine=meter.machine,
    )


def spread_schedules(
    model: nn.Module, method: Method, *, size: tuple[int, int] | None = None, shares: Sequence[float]
) -> dict[str, tuple[int, ...]]:
    """Schedules that take these shares of the model's multiply-adds or a little less, by name."""
    rungs = ladder(model, method, size=size or own_size(model))
    found: dict[str, tuple[int, ...]] = {}
    for share in shares:
        rung = next((rung for rung in rungs if rung.macs <= share * rungs[0].macs), None)
        if rung is not None and rung.keep not in found.values():
            found[f"{share:.0%} of MACs"] = rung.keep
    return found


def _judge(
    models: Sequence[nn.Module], images: Tensor | None, labels: Tensor | None, *, batch: int
) -> tuple[Quality | None, list[float | None]]:
    if images is None:
        return None, [None] * len(models)
    outputs = (answers(model, images, batch=batch) for model in models)
    if labels is not None:
        return "accuracy", [(out.argmax(1) == labels).float().mean().item() for out in outputs]
    whole, *others = outputs
    if transformer(models[0]).num_classes:
        labels = whole.argmax(1)
        return "agreement", [1.0, *((out.argmax(1) == labels).float().mean().item() for out in others)]
    return "similarity", [1.0, *(F.cosine_similarity(out, whole).mean().item() for out in others)]


@torch.inference_mode()
def answers(model: nn.Module, images: Tensor, *, batch: int) -> Tensor:
    """Logits or features ``(n, ·)`` of images, on the CPU, in evaluation mode."""
    like = next(model.parameters())
    model.eval()
    return torch.cat([model(part.to(like)).float().cpu() for part in images.split(batch)])


def _peak(model: nn.Module, images: Tensor) -> int:
    def run() -> None:
        with torch.inference_mode():
            model.eval()(images)

    run()  # makes what is made only once
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


# The trade-off as a picture.

KINDS = (".png", ".svg", ".pdf")
INK, SOFT, LINE = "#1b1c20", "#62656e", "#0b4f8a"
STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
}


def draw(found: Tradeoff, path: Path) -> Path:
    """Quality over multiply-adds and over speed; without quality, speed over multiply-adds."""
    if path.suffix.lower() not in KINDS:
        raise UserError(f"cannot draw {str(path)!r}; give a name that ends in {', '.join(KINDS)}")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    macs = [row.macs / 1e9 for row in found.rows]
    speed = [row.images_per_second.median for row in found.rows]
    rate, cost = "images per second", "GMACs per image"
    with plt.rc_context(STYLE):
        if found.quality is None:
            figure, ax = plt.subplots(figsize=(6.4, 4.6), constrained_layout=True)
            _panel(ax, macs, speed, found, xlabel=cost, ylabel=rate)
        else:
            quality = [100 * (row.quality or 0.0) for row in found.rows]
            figure, (left, right) = plt.subplots(
                1, 2, figsize=(11, 4.6), sharey=True, constrained_layout=True
            )
            _panel(left, macs, quality, found, xlabel=cost, ylabel=f"{found.quality}, %")
            _panel(right, speed, quality, found, xlabel=rate, ylabel="")
            left.set(ylim=left.get_ylim(), yticks=[tick for tick in left.get_yticks() if tick <= 100])
        images = f"images of {found.size[0]}×{found.size[1]}"
        threads = f"{found.machine['threads']} thread{'s' * (found.machine['threads'] != 1)}"
        figure.suptitle(
            f"{found.method}, {images}; speed in batches of {found.batch}, {threads}"
            + (f", {found.quality} of {found.judged} images" if found.quality else ""),
            fontsize=11,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)
    return path


def _panel(ax: Any, x: list[float], y: list[float], found: Tradeoff, *, xlabel: str, ylabel: str) -> None:
    order = sorted(range(len(x)), key=lambda i: found.rows[i].macs)
    ax.plot([x[i] for i in order], [y[i] for i in order], color=LINE, linewidth=2, zorder=2)
    rising = (x[order[-1]] - x[order[0]]) * (y[order[-1]] - y[order[0]]) > 0
    beside = dict(xytext=(-8, 3), ha="right") if rising else dict(xytext=(8, 3), ha="left")  # off the line
    for i, row in enumerate(found.rows):
        filled = row.name == "full"
        ax.plot(
            x[i], y[i], "o", color=LINE, markerfacecolor=LINE if filled else "white", markersize=7, zorder=3
        )
        label = row.name if filled else f"×{row.speedup.median:.1f}"
        ax.annotate(label, (x[i], y[i]), textcoords="offset points", fontsize=10, **beside)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.set_xlim(0, 1.15 * max(x))
    ax.margins(y=0.18)
    ax.grid(color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)
