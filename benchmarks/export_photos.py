"""Whether a reduced, exported classifier gives the library's answer on every photo; its accuracy in float32.

    python benchmarks/export_photos.py --weights vit.safetensors --photos imagenet_val/ --work FOLDER

A pretrained ViT-B/16 with the default method and half of its multiply-adds, in float32: the top-1 class of
the ONNX file in onnxruntime and of the model in torch, photo by photo. Weights and photos are those that
imagenet_reduce.py reports. The file and the answers stay in ``--work``; the same command continues. Where the
answers differ, the result has the margins between the two classes in the logits of the model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import visualtokens
from imagenet_reduce import MODEL, interval, load_model, numbered, predictions, read_photos
from visualtokens.bench import machine
from visualtokens.export.runtime import OnnxModel
from visualtokens.tune.planning import plan

BUDGET = 0.5  # of the multiply-adds
BATCH = 20


def compare(ours: np.ndarray, theirs: np.ndarray, classes: np.ndarray) -> dict[str, Any]:
    """Compare the logits ``(n, classes)`` of the model and of the file."""
    mine, its = ours.argmax(1), theirs.argmax(1)
    differing = np.flatnonzero(mine != its)
    top = np.sort(ours, 1)
    return {
        "photos": len(ours),
        "same_top1": int((mine == its).sum()),
        "differing": [
            {"class": int(classes[i]), "margin": float(ours[i, mine[i]] - ours[i, its[i]])} for i in differing
        ],
        "largest_difference": float(np.abs(ours - theirs).max()),
        "median_difference": float(np.median(np.abs(ours - theirs).max(1))),
        "smallest_margin": float((top[:, -1] - top[:, -2]).min()),
        "top1": {"model": float((mine == classes).mean()), "onnx": float((its == classes).mean())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--save", type=Path, default=Path("results/export_photos.json"))
    parser.add_argument("--batches", type=int, default=10**9, help="at most this many in this run")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    files = numbered(options.photos, 1)
    images, classes = read_photos(files), np.array([int(file.stem) for file in files])
    model = load_model(options.weights, torch.float32)
    whole_file = options.work / "whole.npy"
    if not whole_file.exists():
        np.save(whole_file, predictions(model, images, BATCH).numpy())
    found = plan(model, macs=BUDGET)
    visualtokens.reduce(model, found.method, keep=found.keep)
    file, answers = options.work / "vit.onnx", options.work / "answers.npz"
    if not file.exists():
        visualtokens.export(model, file)
    session = OnnxModel(file, threads=torch.get_num_threads())
    empty = np.zeros((0, 1000), np.float32)
    done = dict(np.load(answers)) if answers.exists() else {"ours": empty, "theirs": empty}
    for _ in range(options.batches):
        batch = images[len(done["ours"]) : len(done["ours"]) + BATCH]
        if not len(batch):
            break
        with torch.inference_mode():
            done["ours"] = np.concatenate([done["ours"], model(batch).numpy()])
        done["theirs"] = np.concatenate([done["theirs"], session(batch.numpy())])
        np.savez(answers, **done)
        print(f"{len(done['ours'])} of {len(images)}", flush=True)
    ours, correct = done["ours"].argmax(1), classes[: len(done["ours"])]
    result = {
        "command": "python benchmarks/export_photos.py --weights FILE --photos FOLDER --work FOLDER",
        "machine": machine(),
        "model": MODEL,
        "method": found.method,
        "keep": found.keep,
    } | compare(done["ours"], done["theirs"], correct)
    whole = np.load(whole_file)[: len(ours)]
    result["top1"]["whole"] = float((whole == correct).mean())
    result["points_over_whole"] = interval(ours == correct, whole == correct)
    options.save.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
