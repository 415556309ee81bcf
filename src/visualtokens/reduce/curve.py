"""The trade-off as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from visualtokens.errors import UserError

if TYPE_CHECKING:
    from visualtokens.reduce.tradeoff import Tradeoff

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
