"""Mask R-CNN on COCO photographs: overfit eight of tiny_coco, then train and evaluate on all of it.

    python benchmarks/learn_tiny_coco.py --coco ../shared/data/tiny_coco --save results/learn_tiny_coco.json

The eight are the first images with one to ten objects. The detector is trained from scratch and evaluated on
them, which checks the path from annotations to metrics, not generalisation. The second run starts from the
first and uses all 50 + 50 images. ``--minutes`` limits the time; run the same command to resume.
"""

from __future__ import annotations

import argparse
import collections
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

SIZE = 256
EIGHT, MOST_OBJECTS = 8, 10
REPEATS = 16  # of each of the eight images per epoch, so that evaluation takes little of the time
MODEL_ARGS: dict[str, Any] = dict(
    backbone="resnet18",
    backbone_args=dict(channels=[24, 48, 96, 192]),
    width=64,
    hidden=512,
    regions=64,
)
EPOCHS = {"eight": 14, "all": 3}


def write_eight(coco: Path, folder: Path) -> str:
    """Write a dataset of eight images, repeated ``REPEATS`` times for training; return its name."""
    known = json.loads((coco / "annotations/instances_train2017.json").read_text())
    objects = collections.defaultdict(list)
    for annotation in known["annotations"]:
        objects[annotation["image_id"]].append(annotation)
    images = [i for i in known["images"] if 1 <= len(objects[i["id"]]) <= MOST_OBJECTS][:EIGHT]
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    for split, repeats in (("train", REPEATS), ("val", 1)):
        document: dict[str, Any] = {"categories": known["categories"], "images": [], "annotations": []}
        for number in range(repeats * len(images)):
            image = images[number % len(images)]
            document["images"].append(image | {"id": number})
            for annotation in objects[image["id"]]:
                record = annotation | {"id": len(document["annotations"]) + 1, "image_id": number}
                document["annotations"].append(record)
        (folder / f"annotations/instances_{split}2017.json").write_text(json.dumps(document))
        link = folder / f"{split}2017"
        if not link.exists():
            link.symlink_to((coco / "train2017").resolve())
    return f"coco:{folder}"


def learn(data: str, out: Path, *, epochs: int, **options: Any) -> dict[str, Any]:
    config = TrainConfig(
        task="detect",
        model="mask_rcnn",
        model_args=MODEL_ARGS,
        data=data,
        out=str(out),
        epochs=epochs,
        size=SIZE,
        batch=8,
        lr=1e-3,
        clip=5.0,
        resume="auto",
        **options,
    )
    began = time.process_time()
    result = train(config)
    if result.signal is not None:
        raise SystemExit(
            f"stopped after {len(result.history)} whole epochs of {out}; run the same command to resume"
        )
    return {
        "epochs": epochs,
        "core_minutes": core_minutes(out, began=began),
        "loss_by_epoch": [round(record["loss"], 3) for record in result.history],
        "box_ap_by_epoch": [round(record["val_box_ap"], 4) for record in result.history],
        "unreadable": len(result.unreadable),
        **{name: round(value, 4) for name, value in result.metrics.items()},
    }


def draw(data: str, out: Path, run: dict[str, Any]) -> Figure:
    """The eight photographs: annotations above, detections below."""
    checkpoint, val = load(out), open_detection(data, "val")
    figure = Figure(figsize=(16, 13), layout="constrained")
    axes = figure.subplots(4, 4)
    for i in range(EIGHT):
        image, objects = val[i]
        known = truth(objects.boxes, objects.labels, objects.masks)
        found = detect.predict(checkpoint.model, image)
        row = 2 * (i // 4)
        for axis, things, title in (
            (axes[row, i % 4], known, "truth"),
            (axes[row + 1, i % 4], found, "found"),
        ):
            axis.imshow(detect.draw(image, things, val.classes))
            axis.set_title(title, fontsize=10)
            axis.set_axis_off()
    figures = f"box AP {run['box_ap']:.1%}, mask AP {run['mask_ap']:.1%}"
    figure.suptitle(f"Overfitting eight COCO photographs: {figures}")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coco", type=Path, required=True, help="folder of tiny_coco")
    parser.add_argument("--epochs", type=int, default=EPOCHS["eight"], help="over the eight images")
    parser.add_argument(
        "--minutes", type=float, help="stop after this many minutes; run the same command to resume"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/tiny_coco"), help="folder of the runs")
    parser.add_argument("--save", type=Path, required=True)
    options = parser.parse_args()
    stop_after(options.minutes)
    data = write_eight(options.coco, options.runs / "data")
    eight = learn(data, options.runs / "eight", epochs=options.epochs, augment="none")
    draw(data, options.runs / "eight", eight).savefig(options.save.with_suffix(".jpg"), dpi=80)
    whole = learn(
        f"coco:{options.coco}",
        options.runs / "all",
        epochs=EPOCHS["all"],
        init=str(options.runs / "eight"),
        save_every=2,
    )
    result = {
        "command": f"python benchmarks/learn_tiny_coco.py --coco TINY_COCO --epochs {options.epochs}",
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "setting": {"detector": "mask_rcnn", **MODEL_ARGS, "size": SIZE, "repeats": REPEATS},
        "parameters": count_parameters(load(options.runs / "eight").model),
        "eight": eight,
        "all": whole,
    }
    options.save.write_text(json.dumps(result, indent=1) + "\n")
    for name, run in (("eight images", eight), ("50 + 50 images", whole)):
        print(
            f"{name}: box AP {run['box_ap']:.1%}, mask AP {run['mask_ap']:.1%} after {run['epochs']} epochs"
        )


if __name__ == "__main__":
    main()
