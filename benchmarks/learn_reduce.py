"""Token Pooling's three training stages on CIFAR-10: accuracy and multiply-adds per method, at two budgets.

    python benchmarks/learn_reduce.py --cifar ../shared/data/cifar10_20k.npz --out /tmp/learn_reduce \
        --save results/learn_reduce.json

1. Train a small DeiT (64 tokens). 2. Per λ, soft extraction learns K of every block. 3. Per method, the same
fine-tuning with hard pooling to those K; and, as reference, fine-tuning of the full model. All runs are saved
in --out: finished stages are not repeated, interrupted ones resume after their last epoch. Times are CPU
times, so other processes do not matter. --quick is a trial of about a minute. A plot is saved next to the
result (results/learn_reduce.png).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visualtokens.bench import machine
from visualtokens.reduce import macs
from visualtokens.train import TrainConfig, load_checkpoint, train
from visualtokens.tune.search import finetune, search

METHODS = ("weighted_kmedoids", "power_bert", "random", "merge")
NAMES = {"weighted_kmedoids": "weighted k-medoids", "power_bert": "PoWER-BERT"}
MODEL = dict(patch_size=4, embed_dim=96, depth=8, num_heads=3)
COMMON: dict[str, Any] = dict(batch=64, seed=0, augment="cifar", device="cpu")


@dataclass(frozen=True)
class Epochs:
    """The length of each stage."""

    base: int
    soft: int
    tune: int
    images: int | None = None  # training images; None: all


FULL = Epochs(base=16, soft=3, tune=3)
QUICK = Epochs(base=1, soft=1, tune=1, images=512)


class Results:
    """The results of the finished stages, in a file that is written after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stages: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def stage(self, name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if name not in self.stages:
            began = time.process_time()
            found = run()
            self.stages[name] = found | {"core_minutes": round((time.process_time() - began) / 60, 2)}
            self.path.write_text(json.dumps(self.stages, indent=1) + "\n")
        stage: dict[str, Any] = self.stages[name]
        print(
            f"{name:32s} accuracy {stage['accuracy']:.2%}, {stage['core_minutes']} core minutes",
            flush=True,
        )
        return stage


def truncate(file: Path, images: int, out: Path) -> Path:
    """A copy of the data with only its first ``images`` images."""
    with np.load(file) as arrays:
        few = {key: arrays[key] if key == "classes" else arrays[key][:images] for key in arrays}
    np.savez(out / "few.npz", **few)
    return out / "few.npz"


def train_base(data: str, out: Path, epochs: int) -> dict[str, Any]:
    config = TrainConfig(
        model="deit_tiny_patch16_224",
        model_args=MODEL,
        data=data,
        out=str(out),
        size=32,
        epochs=epochs,
        lr=1e-3,
        resume="auto",
        **COMMON,
    )
    result = train(config)
    if result.signal is not None:
        raise SystemExit(f"stopped by signal {result.signal}; run the same command again to resume")
    return {"accuracy": result.accuracy, "macs": macs(load_checkpoint(out).model).total}


def tune_whole(start: Path, data: str, out: Path, epochs: int) -> dict[str, Any]:
    """The same fine-tuning without pooling: a method that keeps all tokens changes nothing."""
    blocks, patches = MODEL["depth"], 64
    return tune(str(start), data, out, "power_bert", [patches] * blocks, epochs)


def extract(start: Path, data: str, out: Path, price: float, epochs: int) -> dict[str, Any]:
    found = search(start, data=data, out=out, price=price, options=COMMON | dict(epochs=epochs, lr=5e-4))
    return {
        "accuracy": found.soft.accuracy,
        "keep": list(found.keep),
        "mass": [round(m, 2) for m in found.mass],
        "start": found.start,
    }


def tune(start: str, data: str, out: Path, method: str, keep: list[int], epochs: int) -> dict[str, Any]:
    options = COMMON | dict(epochs=epochs, lr=3e-4)
    result = finetune(start, data=data, out=out, method=method, keep=keep, options=options)
    return {"accuracy": result.accuracy, "macs": macs(load_checkpoint(out).model).total}


def run(options: argparse.Namespace) -> dict[str, Any]:
    epochs = QUICK if options.quick else FULL
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    file = options.cifar if epochs.images is None else truncate(options.cifar, epochs.images, out)
    data, results = f"npz:{file}", Results(out / "stages.json")
    base = results.stage("base", lambda: train_base(data, out / "base", epochs.base))
    both = epochs.soft + epochs.tune  # as many as the reduced models train in both stages
    whole = results.stage("whole, tuned", lambda: tune_whole(out / "base", data, out / "whole", both))
    budgets = []
    for price in options.prices:
        folder = out / f"lambda_{price:g}"
        soft = results.stage(
            f"lambda {price:g}",
            lambda price=price, folder=folder: extract(out / "base", data, folder, price, epochs.soft),
        )
        tuned = {
            method: results.stage(
                f"lambda {price:g}, {method}",
                lambda method=method, folder=folder, soft=soft: tune(
                    soft["start"], data, folder / method, method, soft["keep"], epochs.tune
                ),
            )
            for method in METHODS
        }
        budgets.append({"lambda": price, "soft": soft, "methods": tuned})
    minutes = round(sum(stage["core_minutes"] for stage in results.stages.values()), 1)
    return {"base": base, "whole": whole, "budgets": budgets, "core_minutes": minutes}


def draw(found: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5), layout="constrained")
    ax = figure.subplots()
    styles = zip(METHODS, ("#0b4f8a", "#c4501b", "#62656e", "#2b7a3d"), ("o", "s", "^", "D"), strict=True)
    for method, color, marker in styles:
        points = sorted(
            (b["methods"][method]["macs"], b["methods"][method]["accuracy"]) for b in found["budgets"]
        )
        x, y = zip(*points, strict=True)
        label = NAMES.get(method, method)
        ax.plot(
            [v / 1e6 for v in x], [100 * v for v in y], color=color, marker=marker, linewidth=2, label=label
        )
    whole = found["whole"]
    ax.plot(whole["macs"] / 1e6, 100 * whole["accuracy"], "k*", markersize=13, label="full model")
    ax.set(xlabel="million multiply-adds per image", ylabel="accuracy, %")
    ax.grid(color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    ax.set_title("A DeiT of width 96 on CIFAR-10, the same fine-tuning for all", fontsize=11)
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cifar", type=Path, required=True, help="npz file with CIFAR-10")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the runs; finished stages are not repeated"
    )
    parser.add_argument("--save", type=Path, help="JSON file for the result; the plot is saved next to it")
    parser.add_argument(
        "--prices", type=float, nargs="+", default=[1e-3, 3e-4], help="λ, one schedule for each"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a trial of about a minute")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = run(options)
    for budget in found["budgets"]:
        print(f"lambda {budget['lambda']:g} keeps {budget['soft']['keep']}")
    print(f"{found['core_minutes']} core minutes in total")
    if options.save:
        command = (
            "python benchmarks/learn_reduce.py --cifar FILE --out FOLDER --save results/learn_reduce.json"
        )
        result = {"command": command, "machine": machine(), "model": MODEL} | found
        options.save.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        draw(found, options.save.with_suffix(".png"))


if __name__ == "__main__":
    main()
