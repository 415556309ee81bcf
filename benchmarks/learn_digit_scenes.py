"""Mask R-CNN on the built-in digit scenes of 128×128, trained from scratch, evaluated on unseen scenes.

    python benchmarks/learn_digit_scenes.py --save results/learn_digit_scenes.json

Writes the metrics and, next to them, a picture of scenes with annotated and detected objects. ``--minutes``
limits the time; run the same command to resume.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from budget import core_minutes, stop_after
from visualtokens.bench import count_parameters, machine
from visualtokens.checkpoint import load
from visualtokens.data import open_detection
from visualtokens.tasks import detect
from visualtokens.tasks.detect.detections import truth
from visualtokens.train import TrainConfig, train

DATA = "digit_scenes"
SIZE = 128
MODEL_ARGS: dict[str, Any] = dict(
    backbone="resnet18",
    backbone_args=dict(channels=[24, 48, 96, 192]),
    width=64,
    hidden=256,
    regions=32,
)
SHOWN = tuple(range(8))  # unseen scenes in the picture


def learn(out: Path, *, epochs: int) -> dict[str, Any]:
    """Train or resume; return the metrics and the history of the run."""
    config = TrainConfig(
        task="detect",
        model="mask_rcnn",
        model_args=MODEL_ARGS,
        data=DATA,
        out=str(out),
        epochs=epochs,
        size=SIZE,
        batch=8,
        lr=1e-3,
        warmup_epochs=0.3,
        clip=5.0,
        save_every=50,
        resume="auto",
    )
    began = time.process_time()
    result = train(config)
    done = len(result.history)
    return {
        "finished": result.signal is None,
        "epochs": done,
        "core_minutes": core_minutes(out, began=began),
        "train_images_per_second": round(result.images_per_second, 1),
        "box_ap50_by_epoch": [round(record["val_box_ap50"], 4) for record in result.history],
        "mask_ap50_by_epoch": [round(record["val_mask_ap50"], 4) for record in result.history],
        "loss_by_epoch": [round(record["loss"], 3) for record in result.history],
        **{name: round(value, 4) for name, value in result.metrics.items()},
    }


def draw(out: Path, run: dict[str, Any]) -> Figure:
    """Pairs of pictures: the annotated and the detected objects of a scene."""
    checkpoint, val = load(out), open_detection(DATA, "val")
    figure = Figure(figsize=(12, 12.6), layout="constrained")
    axes = figure.subplots(4, 4).reshape(-1, 2)  # (8, 2)
    for i, (left, right) in zip(SHOWN, axes, strict=True):
        image, objects = val[i]
        known = truth(objects.boxes, objects.labels, objects.masks)
        found = detect.predict(checkpoint.model, image)
        for axis, things, title in ((left, known, "truth"), (right, found, "found")):
            axis.imshow(detect.draw(image, things, val.classes))
            axis.set_title(title, fontsize=10)
            axis.set_axis_off()
    figure.suptitle(
        f"Unseen scenes; box AP50 {run['box_ap50']:.1%}, mask AP50 {run['mask_ap50']:.1%} of 500 "
        f"after {run['core_minutes']:.0f} core-minutes"
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--minutes", type=float, help="stop after this many minutes; run the same command to resume"
    )
    parser.add_argument("--run", type=Path, default=Path("runs/digit_scenes"), help="folder of the run")
    parser.add_argument("--save", type=Path, required=True)
    options = parser.parse_args()
    options.run.mkdir(parents=True, exist_ok=True)
    stop_after(options.minutes)
    run = learn(options.run, epochs=options.epochs)
    if not run["finished"]:
        print(f"stopped after {run['epochs']} whole epochs; run the same command to resume: {run}")
        return
    model = load(options.run).model
    result = {
        "command": f"python benchmarks/learn_digit_scenes.py --epochs {options.epochs}",
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "setting": {"detector": "mask_rcnn", **MODEL_ARGS, "size": SIZE, "scenes": [4000, 500]},
        "parameters": count_parameters(model),
        **run,
    }
    options.save.write_text(json.dumps(result, indent=1) + "\n")
    draw(options.run, run).savefig(options.save.with_suffix(".png"), dpi=100)
    print(
        f"box AP50 {run['box_ap50']:.1%}, AP {run['box_ap']:.1%}; mask AP50 {run['mask_ap50']:.1%}, AP "
        f"{run['mask_ap']:.1%} on 500 unseen scenes after {run['core_minutes']} core-minutes"
    )


if __name__ == "__main__":
    main()
