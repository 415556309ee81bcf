"""Segmentation with a reduced backbone: the price in mIoU and the gain in images/s, on Oxford-IIIT Pets.

    python benchmarks/dense_reduce.py --weights vit.safetensors --pets ../shared/data/pets \
        --save results/dense_reduce.json

Trains a small FPN on the maps of a frozen, pretrained ViT-B/16 (``--weights`` as in imagenet_reduce.py), then
reduces the backbone by several budgets without further training. Patches get the feature of their token. The
speed is that of whole segmentation models, interleaved. An interrupted training is resumed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from imagenet_reduce import load_model
from visualtokens.bench import interleave, machine, matmul_canary
from visualtokens.bench.comparison import Candidate, prepare
from visualtokens.checkpoint import load
from visualtokens.data import open_segmentation
from visualtokens.data.segmentation import create_segment_loader
from visualtokens.files import write_atomically
from visualtokens.reduce import macs, reduce, restore
from visualtokens.tasks import segment
from visualtokens.train import TrainConfig, train

BACKBONE = "vit_base_patch16_224"
MODEL_ARGS: dict[str, Any] = dict(
    backbone=BACKBONE,
    out_indices=[5, 8, 11],
    backbone_args=dict(dynamic_img_size=True, dynamic_img_pad=True),  # images keep their aspect ratio
    head_args=dict(dim=96, width=48),
)
BUDGETS = (0.5, 0.7, 0.36)  # of the backbone's multiply-adds
SETTINGS = (
    ("whole", 1.0),
    ("weighted_merge", 0.5),
    ("merge", 0.5),
    ("weighted_merge", 0.7),
    ("weighted_merge", 0.36),
    ("merge", 0.7),
    ("merge", 0.36),
)


def learn(weights: Path, data: str, out: Path, *, size: int, epochs: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    plain = out / "backbone.safetensors"
    if not plain.exists():
        save_file(load_model(weights, torch.float32).state_dict(), plain)
    result = train(
        TrainConfig(
            task="segment",
            model="fpn",
            model_args=MODEL_ARGS,
            init=str(plain),
            freeze="backbone",
            data=data,
            out=str(out / "run"),
            epochs=epochs,
            size=size,
            batch=16,
            lr=2e-3,
            label_smoothing=0.0,
            bf16=True,
            seed=0,
            resume="auto",
        )
    )
    if result.signal is not None:
        raise SystemExit(f"stopped by signal {result.signal}; run the same command to resume")


def evaluate(checkpoint: Any, data: str) -> dict[str, Any]:
    loader = create_segment_loader(
        open_segmentation(data, "val"), checkpoint.preprocess, batch=16, train=False
    )
    with torch.autocast("cpu", torch.bfloat16):
        found = segment.evaluate(checkpoint.model, loader, classes=checkpoint.classes, progress=True)
    return {
        "miou": round(found.miou, 4),
        "pixel_accuracy": round(found.pixel_accuracy, 4),
        "images": found.images,
    }


def speeds(folder: Path, size: int, batch: int, rounds: int) -> dict[str, Any]:
    """Images/s of the whole model, and with the default method at every budget."""
    images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))
    runs = {}
    for budget in (1.0, *BUDGETS):
        model = load(folder).model
        if budget < 1:
            reduce(model, macs=budget)
        runs[f"{budget:g}"] = prepare(Candidate(f"{budget:g}", model), images, "eager")
    timings = interleave(runs, rounds=rounds, canary=matmul_canary(images.device))
    found: dict[str, Any] = {"quiet": timings.quiet}
    for name in runs:
        rate, ratio = timings.rate(name, batch), timings.ratio(name)
        found[name] = {"images_per_second": asdict(rate), "speedup": asdict(ratio)}
    return found


def write(saved: dict[str, Any], path: Path) -> None:
    text = json.dumps(saved, indent=1) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--pets", required=True, help="folder of Oxford-IIIT Pets with trimaps")
    parser.add_argument("--size", type=int, default=224, help="short side of the images")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/dense_reduce"), help="folder of the run")
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--speed", action="store_true", help="measure images/s; needs a quiet machine")
    options = parser.parse_args()
    data, folder = f"pets:{options.pets}", options.runs / "run"
    learn(options.weights, data, options.runs, size=options.size, epochs=options.epochs)
    saved: dict[str, Any] = json.loads(options.save.read_text()) if options.save.exists() else {"rows": []}
    saved |= {
        "command": f"python benchmarks/dense_reduce.py --weights FILE --pets PETS --size {options.size}",
        "machine": machine(),
        "model": f"fpn on {BACKBONE}, short side {options.size}, {options.epochs} epoch",
    }
    checkpoint = load(folder)
    done = {(row["method"], row["budget"]) for row in saved["rows"]}
    for method, budget in SETTINGS:
        if (method, budget) in done:
            continue
        if budget < 1:
            reduce(checkpoint.model, method, macs=budget)
        cost = macs(checkpoint.model).total
        row = {"method": method, "budget": budget, "backbone_gmacs": round(cost / 1e9, 3)}
        saved["rows"].append(row | evaluate(checkpoint, data))
        if budget < 1:
            restore(checkpoint.model)
        print(saved["rows"][-1], flush=True)
        write(saved, options.save)
    if options.speed:
        saved["speed"] = {f"batch {batch}": speeds(folder, options.size, batch, rounds=7) for batch in (8, 1)}
        write(saved, options.save)


if __name__ == "__main__":
    main()
