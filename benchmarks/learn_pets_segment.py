"""FPN against VT-FPN on the trimaps of Oxford-IIIT Pets: same backbone, budget and seed, from scratch.

    python benchmarks/learn_pets_segment.py --pets ../shared/data/pets --save results/learn_pets_segment.json

Writes the metrics and, next to them, a picture of photos, truth and both predictions. The runs differ in the
head only. An interrupted run is resumed; a run whose results are in the file is not repeated.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

from budget import core_minutes, stop_after
from visualtokens.bench import count_parameters, machine, macs_by_module
from visualtokens.checkpoint import load
from visualtokens.data import open_segmentation
from visualtokens.data.segmentation import create_segment_loader
from visualtokens.layers import TokenConv
from visualtokens.tasks import segment
from visualtokens.train import TrainConfig, train

SIZE = 160
BACKBONE = dict(backbone="resnet18", backbone_args=dict(channels=[24, 48, 96, 192]))
# Half of the paper's 256 channels, with narrower tokens accordingly.
HEADS: dict[str, dict[str, Any]] = {
    "fpn": dict(dim=128, width=64),
    "vt_fpn": dict(dim=128, width=64, token_dim=128, attn_dim=64, hidden=128),
}
TITLES = {"fpn": "FPN", "vt_fpn": "VT-FPN"}
SHOWN = (5, 64, 118, 187, 240, 301)  # validation images


def learn(head: str, data: str, *, epochs: int, out: Path) -> dict[str, Any]:
    config = TrainConfig(
        task="segment",
        model=head,
        model_args=BACKBONE | dict(head_args=HEADS[head]),
        data=data,
        out=str(out),
        epochs=epochs,
        size=SIZE,
        batch=16,
        lr=2e-3,
        label_smoothing=0.0,
        seed=0,
        channels_last=True,
        resume="auto",
    )
    began = time.process_time()
    result = train(config)
    if result.signal is not None:
        raise SystemExit(f"stopped by signal {result.signal}; run the same command to resume")
    return {
        **evaluate(out, data),
        **cost(out),
        "epochs": epochs,
        "core_minutes": core_minutes(out, began=began),
        "miou_by_epoch": [round(record["val_miou"], 4) for record in result.history],
    }


def evaluate(folder: Path, data: str) -> dict[str, Any]:
    """Metrics of the last epoch's model at a single scale, and mIoU at three scales with flipping."""
    checkpoint = load(folder)
    model, classes, preprocess = checkpoint.model, checkpoint.classes, checkpoint.preprocess
    found = {}
    for name, inference in (
        ("once", None),
        ("scales", segment.Inference(scales=(0.75, 1.0, 1.25), flip=True)),
    ):
        loader = create_segment_loader(open_segmentation(data, "val"), preprocess, batch=16, train=False)
        found[name] = segment.evaluate(model, loader, classes=classes, inference=inference, progress=False)
    once = found["once"]
    return {
        "miou": round(once.miou, 4),
        "iou": {name: round(value or 0, 4) for name, value in zip(classes, once.iou, strict=True)},
        "pixel_accuracy": round(once.pixel_accuracy, 4),
        "images": once.images,
        "miou_three_scales_and_flip": round(found["scales"].miou, 4),
    }


def cost(folder: Path) -> dict[str, Any]:
    model = load(folder).model
    counts = macs_by_module(model, (SIZE, SIZE), depth=None)
    token_macs = sum(counts.get(name, 0) for name, m in model.named_modules() if isinstance(m, TokenConv))
    return {
        "mmacs": round(counts[""] / 1e6, 1),
        "mmacs_pyramid": round(counts["decoder.pyramid"] / 1e6, 1),
        "mmacs_pyramid_without_token_convolutions": round((counts["decoder.pyramid"] - token_macs) / 1e6, 1),
        "parameters": count_parameters(model),
    }


def draw(data: str, folders: dict[str, Path], runs: dict[str, Any]) -> Figure:
    """One row per photo: photo, truth and the prediction of each model."""
    val = open_segmentation(data, "val")
    models = {head: load(folder) for head, folder in folders.items()}
    figure = Figure(figsize=(10.5, 2.35 * len(SHOWN)), layout="constrained")
    axes = figure.subplots(len(SHOWN), 2 + len(models), squeeze=False)
    for row, index in zip(axes, SHOWN, strict=True):
        photo, truth = val[index]
        pictures: list[tuple[str, Image.Image]] = [("photo", photo)]
        drawn = segment.overlay(photo, truth, classes=val.classes, legend=False)
        pictures.append(("truth", drawn))
        for head, checkpoint in models.items():
            labels = segment.predict(
                checkpoint.model, photo, preprocess=checkpoint.preprocess, classes=checkpoint.classes
            )
            title = f"{TITLES[head]}\nmIoU of all 370: {100 * runs[head]['miou']:.1f} %"
            pictures.append((title, segment.overlay(photo, labels, classes=val.classes, legend=False)))
        for axis, (title, picture) in zip(row, pictures, strict=True):
            axis.imshow(picture)
            axis.set_axis_off()
            if index == SHOWN[0]:
                axis.set_title(title, fontsize=10)
    colours = segment.palette(len(val.classes)) / 255
    handles = [Patch(color=colour, label=name) for colour, name in zip(colours, val.classes, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pets", required=True, help="folder of Oxford-IIIT Pets with trimaps")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--minutes", type=float, help="stop after this many minutes; run the same command to resume"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/pets_segment"), help="folder of the runs")
    parser.add_argument("--save", type=Path, required=True)
    options = parser.parse_args()
    stop_after(options.minutes)
    data = f"pets:{options.pets}"
    saved = json.loads(options.save.read_text()) if options.save.exists() else {"runs": {}}
    saved["command"] = f"python benchmarks/learn_pets_segment.py --pets PETS --epochs {options.epochs}"
    saved["machine"] = machine()
    saved["threads"] = torch.get_num_threads()
    saved["setting"] = {"backbone": BACKBONE, "heads": HEADS, "size": SIZE, "images": [1110, 370]}
    folders = {head: options.runs / head for head in HEADS}
    for head, folder in folders.items():
        if head not in saved["runs"]:
            saved["runs"][head] = learn(head, data, epochs=options.epochs, out=folder)
            options.save.write_text(json.dumps(saved, indent=1) + "\n")
        run = saved["runs"][head]
        print(
            f"{TITLES[head]:7s} mIoU {run['miou']:.2%}, pyramid {run['mmacs_pyramid']} of {run['mmacs']} M "
            f"MACs, {run['epochs']} epochs, {run['core_minutes']} core-minutes"
        )
    draw(data, folders, saved["runs"]).savefig(options.save.with_suffix(".jpg"), dpi=110)


if __name__ == "__main__":
    main()
