"""Speed of token reduction against the plain model, interleaved in one run, and the share of time in pooling.

    python benchmarks/bench_reduce.py --save results/bench_reduce.json

DeiT-S and ViT-B/16 at 224², batch 8 and 1, each candidate in its own process; some of them also under
``torch.compile``, against the compiled plain model. Targets: at the schedule deit_small/3 (2.3 of 4.6 GMACs)
at least 1.7 times the images/s at batch 8 and 1.4 times at batch 1, at most 8 % of the forward pass in the
pooling at batch 8, and deit_small/0 not slower than the plain model by more than 3 %; ViT-B/16 with the
default reduction to half of the MACs at least 1.75 times at batch 8 and 1.6 times at batch 1.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import visualtokens
from own_process import OwnProcess, in_turns
from visualtokens.bench import machine
from visualtokens.reduce import Pool, macs

PLAIN = "plain"
DEIT: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "weighted_merge": dict(method="weighted_merge", keep="deit_small/3"),
    "weighted_kmedoids": dict(method="weighted_kmedoids", keep="deit_small/3"),
    "weighted_kmedoids, not carried": dict(method="weighted_kmedoids", keep="deit_small/3", carry=False),
    "kmedoids": dict(method="kmedoids", keep="deit_small/3"),
    "kmeans": dict(method="kmeans", keep="deit_small/3"),
    "power_bert": dict(method="power_bert", keep="deit_small/3"),
    "merge": dict(method="merge", keep="deit_small/3"),
    "merge, 13 a block": dict(method="merge", keep=-13),
    "weighted_kmedoids, deit_small/0": dict(method="weighted_kmedoids", keep="deit_small/0"),
}
VIT_B: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "default": dict(macs=0.5),
    "merge": dict(method="merge", macs=0.5),
}
MODELS = {"vit_base_patch16_224": VIT_B, "deit_small_patch16_224": DEIT}
COMPILED = {
    "deit_small_patch16_224": (
        PLAIN,
        "weighted_merge",
        "weighted_kmedoids",
        "weighted_kmedoids, deit_small/0",
    )
}
TURN = 0.3  # seconds
PASSES = 15  # to measure the share of pooling


def runner(model: nn.Module, images: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.inference_mode():
            return model(images)

    return run


def pooling_share(model: nn.Module, images: Tensor) -> float:
    """The share of a forward pass spent in the pools: the median over ``PASSES`` passes."""
    spent: list[float] = []
    pools = [m for m in model.modules() if isinstance(m, Pool)]
    handles = [p.register_forward_pre_hook(lambda *_: spent.append(-time.perf_counter())) for p in pools]
    handles += [p.register_forward_hook(lambda *_: spent.append(time.perf_counter())) for p in pools]
    run, shares = runner(model, images), []
    for _ in range(PASSES):
        spent.clear()
        start = time.perf_counter()
        run()
        shares.append(sum(spent) / (time.perf_counter() - start))
    for handle in handles:
        handle.remove()
    return statistics.median(shares)


def make(base: str, name: str, batch: int, compiled: bool) -> Callable[[], Tensor]:
    """The forward pass of one candidate; all candidates get the same images."""
    model, images = candidate(base, name, batch)
    return runner(torch.compile(model, dynamic=False) if compiled else model, images)


def candidate(base: str, name: str, batch: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, images = timm.create_model(base).eval(), torch.randn(batch, 3, 224, 224)
    options = MODELS[base][name]
    return visualtokens.reduce(model, **options) if options else model, images


def measure(base: str, batch: int, compiled: bool, rounds: int) -> dict[str, Any]:
    names = COMPILED[base] if compiled else tuple(MODELS[base])
    runs = {name: OwnProcess(functools.partial(make, base, name, batch, compiled)) for name in names}
    timings = in_turns(runs, rounds=rounds, seconds=TURN, retries=0)
    rows = {}
    for name in names:
        rate, ratio = timings.rate(name, batch), timings.ratio(name)
        model, images = candidate(base, name, batch)
        rows[name] = {
            "gmacs": macs(model).total / 1e9,
            "images_per_second": rate.median,
            "ratio": ratio.median,
            "ratio_low": ratio.low,
            "ratio_high": ratio.high,
            "pooling_share": None if compiled or name == PLAIN else pooling_share(model, images),
        }
    turns = {"rounds": rounds, "noisy_turns": timings.noisy}
    return {"model": base, "batch": batch, "compiled": compiled, **turns, "rows": rows}


def show(measured: dict[str, Any]) -> None:
    print(f"\n{measured['model']}, batch {measured['batch']}" + ", compiled" * measured["compiled"])
    for name, row in measured["rows"].items():
        print(
            f"  {name:34s} {row['gmacs']:.2f} GMACs {row['images_per_second']:7.1f} images/s "
            f"{row['ratio']:.2f}× [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]"
            + ("" if row["pooling_share"] is None else f"  pooling {row['pooling_share']:.1%}"),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, help="write the result here as JSON")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--eager", action="store_true", help="leave out the compiled models")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python benchmarks/bench_reduce.py --save results/bench_reduce.json",
        "machine": machine(),
        "measured": [],
    }
    for compiled in (False,) if options.eager else (False, True):
        for base, batch in itertools.product(options.models, options.batches):
            if compiled and base not in COMPILED:
                continue
            result["measured"].append(measure(base, batch, compiled, options.rounds))
            show(result["measured"][-1])
            if options.save:
                options.save.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
