"""The cost of explaining one image, relative to the forward passes over its masked copies.

    python benchmarks/bench_explain.py [--save results/bench_explain.json]

``cluster``: an explanation at 224² with 49 clusters runs the model on the image and on 49 masked copies. For
the plain forward passes the copies are made beforehand and run in the same batches of 16, or all at once.
``shapley``: 49 regions and 256 evaluations, with hidden regions in the mean colour or, in a ViT, with their
tokens removed, relative to 256 plain forward passes in batches of 16. Explaining starts from the photo and
includes preprocessing, finding the regions, masking and ranking.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import visualtokens
from visualtokens.bench import interleave, machine
from visualtokens.explain import explain
from visualtokens.explain.importance import mask, normalise
from visualtokens.explain.inputs import prepare
from visualtokens.grouping import record_groupings

MODELS = ("paca_vit_b0",)  # the cheapest model with 49 clusters: the overhead is largest
MAX_COST = 1.2
BATCH = 16
REGIONS, BUDGET = 49, 256
# model, what stands in for hidden regions, and the most that explaining may cost
SHAPLEY = (
    ("paca_vit_b0", "mean", 1.1),
    ("deit_small_patch16_224", "mean", 1.1),
    ("deit_small_patch16_224", "tokens", 0.8),
)


def photo() -> Image.Image:
    """Blobs of colour, 640×480."""
    small = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((640, 480), Image.Resampling.BICUBIC)


def masked_copies(model: nn.Module, image: Image.Image) -> Tensor:
    """``(K, 3, H, W)``: the masked copies of an explanation of the last grouping."""
    inputs = prepare(model, image, None)
    with torch.no_grad(), record_groupings(model) as groupings:
        model(inputs.x.unsqueeze(0))
    maps = list(groupings.values())[-1].maps()[0]
    return mask(inputs.x, inputs.black, normalise(maps))


def forward(model: nn.Module, copies: Tensor, batch: int) -> None:
    """Run the model on the copies in batches."""
    with torch.no_grad():
        for part in copies.split(batch):
            model(part)


def cost(name: str, rounds: int) -> dict[str, Any]:
    """The time of explaining relative to plain forward passes, interleaved."""
    torch.manual_seed(0)
    model, image = visualtokens.create_model(name).eval(), photo()
    copies = masked_copies(model, image)
    candidates = {
        "explain": lambda: explain(model, image, method="cluster", batch=BATCH),
        f"forward, batches of {BATCH}": lambda: forward(model, copies, BATCH),
        "forward, all at once": lambda: forward(model, copies, len(copies)),
    }
    timings = interleave(candidates, rounds=rounds)
    costs = {}
    for baseline in timings.names[1:]:
        ratio = timings.ratio(baseline)  # speed relative to explaining
        costs[baseline] = {"cost": ratio.median, "interval": [ratio.low, ratio.high]}
    return {
        "model": name,
        "clusters": len(copies),
        "size": list(copies.shape[2:]),
        "seconds": {n: timings.rate(n).median ** -1 for n in timings.names},
        "cost_of_explaining": costs,
        "at_most": MAX_COST,
        "met": all(one["cost"] <= MAX_COST for one in costs.values()),
        "quiet": timings.quiet,
    }


def shapley_cost(name: str, hide: str, at_most: float, rounds: int) -> dict[str, Any]:
    """The time of Shapley values relative to as many plain forward passes, interleaved."""
    torch.manual_seed(0)
    model, image = timm.create_model(name).eval(), photo()
    x = prepare(model, image, None).x
    copies = x.expand(BUDGET, -1, -1, -1) + 0.1 * torch.randn(BUDGET, 1, 1, 1)
    options: dict[str, Any] = dict(regions=REGIONS, budget=BUDGET, hide=hide, batch=BATCH, path=0)
    candidates = {
        "explain": lambda: explain(model, image, method="shapley", **options),
        f"forward, batches of {BATCH}": lambda: forward(model, copies, BATCH),
    }
    timings = interleave(candidates, rounds=rounds, retries=0)  # a turn takes half a minute
    ratio = timings.ratio(timings.names[1])  # speed relative to explaining
    found = explain(model, image, method="shapley", **options)
    return {
        "model": name,
        "method": "shapley",
        "hide": hide,
        "regions": len(found.values),
        "evaluations": found.evaluations,
        "seconds": {n: timings.rate(n).median ** -1 for n in timings.names},
        "cost_of_explaining": {timings.names[1]: {"cost": ratio.median, "interval": [ratio.low, ratio.high]}},
        "at_most": at_most,
        "met": ratio.median <= at_most,
        "quiet": timings.quiet,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, help="JSON file for the result")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="of the cost of clusters")
    parser.add_argument("--shapley", nargs="*", default=[one[0] for one in SHAPLEY], help="of Shapley values")
    parser.add_argument("--hide", nargs="*", default=["mean", "tokens"], help="of Shapley values")
    options = parser.parse_args()
    runs = [partial(cost, name, options.rounds) for name in options.models]
    runs += [
        partial(shapley_cost, *one, options.rounds)
        for one in SHAPLEY
        if one[0] in options.shapley and one[1] in options.hide
    ]
    for run in runs:
        row = run()
        for baseline, found in row["cost_of_explaining"].items():
            interval = "({:.2f}–{:.2f})".format(*found["interval"])
            print(f"{' '.join(key(row)):40s} explain: {found['cost']:.2f}× {interval} {baseline}", flush=True)
        if options.save:
            save(row, options.save)


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    """What a row is about: model, method, and what stands in for hidden regions."""
    return row["model"], row.get("method", "cluster"), row.get("hide", "black")


def save(row: dict[str, Any], path: Path) -> None:
    """Add a row to the file, in place of an earlier one about the same."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    result = {
        "command": f"python benchmarks/bench_explain.py --save {path}",
        "machine": machine(),
        "rows": [*(other for other in rows if key(other) != key(row)), row],
    }
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
