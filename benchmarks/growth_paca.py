"""How time and memory of PaCa-ViT-B2 and PVTv2-B2 grow with the image, one image at a time.

    python benchmarks/growth_paca.py [--save results/growth_paca.json]

Also draws a plot (results/growth_paca.png). The exponent in the legend is the slope of the line fitted to the
points: cost ∝ patches^exponent.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import visualtokens
from visualtokens.bench import machine, peak_memory

MODELS = {"paca_vit_b2": "PaCa-ViT-B2", "pvt_v2_b2": "PVTv2-B2"}
PASSES = ("forward", "forward and backward")
SIDES = (224, 320, 448, 640, 896, 1280)
STRIDE = 4  # of the first stage, which defines the number of patches
SECONDS = 1.0  # duration of a measurement; the fastest run counts

Row = dict[str, Any]


def measure(name: str, model: nn.Module, work: str, side: int) -> Row:
    images = torch.randn(1, 3, side, side)
    run = forward(model, images) if work == PASSES[0] else forward_and_backward(model, images)
    peak = peak_memory(run)  # also warms up
    return {
        "model": name,
        "pass": work,
        "side": side,
        "patches": (side // STRIDE) ** 2,
        "seconds": fastest(run),
        "peak_bytes": peak,
    }


def forward(model: nn.Module, images: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.inference_mode():
            model(images)

    return run


def forward_and_backward(model: nn.Module, images: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        model(images).sum().backward()
        model.zero_grad(set_to_none=True)

    return run


def fastest(run: Callable[[], None]) -> float:
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def exponent(rows: list[Row], metric: str) -> float:
    patches, values = np.array([(row["patches"], row[metric]) for row in rows]).T
    return float(np.polyfit(np.log(patches), np.log(values), 1)[0])


def series(rows: list[Row], name: str, work: str) -> list[Row]:
    return [row for row in rows if row["model"] == name and row["pass"] == work]


def draw(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    plt.rcParams |= {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    figure, axes = plt.subplots(1, 2, figsize=(12, 5.2), constrained_layout=True)
    metrics = [
        ("seconds", "seconds per image", 1.0),
        ("peak_bytes", "peak memory above the weights, MB", 1e6),
    ]
    for ax, (metric, label, unit) in zip(axes, metrics, strict=True):
        for name, title in MODELS.items():
            for work in PASSES:
                points = series(rows, name, work)
                # Readable without colour: line and fill show the model, the marker shows the pass.
                ours, both = name == "paca_vit_b2", work == PASSES[1]
                color = "#0b4f8a" if ours else "#c4501b"
                ax.plot(
                    [row["patches"] for row in points],
                    [row[metric] / unit for row in points],
                    color=color,
                    linestyle="-" if ours else "--",
                    marker="s" if both else "o",
                    markerfacecolor=color if ours else "white",
                    markersize=7,
                    linewidth=2,
                    label=f"{title}, {work}: patches$^{{{exponent(points, metric):.2f}}}$",
                )
        ax.set(xscale="log", yscale="log", ylabel=label)
        ax.set_xticks([(side // STRIDE) ** 2 for side in SIDES], [f"{side}²" for side in SIDES])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.set_xlabel("image, pixels (log of the number of patches)")
        ax.grid(color="0.88", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.legend(frameon=False, fontsize=10, loc="upper left")
        low, high = ax.get_ylim()
        ax.set_ylim(low, high * 6)  # room for the legend
    threads = machine()["threads"]
    figure.suptitle(f"Cost of one image, {threads} threads of a CPU, eager", fontsize=13)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, help="JSON file for the result; the plot is written next to it")
    parser.add_argument("--most", type=int, default=max(SIDES), help="largest image side")
    options = parser.parse_args()
    torch.manual_seed(0)
    models = {name: visualtokens.create_model(name).eval() for name in MODELS}
    rows = []
    for side in [side for side in SIDES if side <= options.most]:
        for work in PASSES:
            for name, model in models.items():
                row = measure(name, model, work, side)
                print(
                    f"{side:5d}² {name:12s} {work:21s} {row['seconds']:7.2f} s  "
                    f"{row['peak_bytes'] / 1e6:7.0f} MB",
                    flush=True,
                )
                rows.append(row)
    exponents = [
        {"model": name, "pass": work}
        | {metric: exponent(series(rows, name, work), metric) for metric in ("seconds", "peak_bytes")}
        for name in MODELS
        for work in PASSES
    ]
    for entry in exponents:
        print(
            f"{entry['model']:12s} {entry['pass']:21s} time ∝ patches^{entry['seconds']:.2f}, "
            f"memory ∝ patches^{entry['peak_bytes']:.2f}"
        )
    if options.save:
        result = {
            "command": "python benchmarks/growth_paca.py --save results/growth_paca.json",
            "machine": machine(),
            "exponents": exponents,
            "rows": rows,
        }
        options.save.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        draw(rows, options.save.with_suffix(".png"))


if __name__ == "__main__":
    main()
