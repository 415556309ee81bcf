"""Faithfulness of cluster maps on photos of pets, compared with other saliency methods.

    python benchmarks/faithful_pets.py --pets ../shared/data/pets --save results/faithful_pets.json

A small PaCa-ViT is trained to classify crops of the training photos as pet or background: squares of 64
pixels, selected by the trimaps, as many of each. Both classes are cropped at the photo's own scale and
augmented alike, so they differ in content only. The model then classifies the centre of whole validation
photos at 160 pixels a side, and every method explains the predicted class with at most ``--budget`` forward
passes; a backward pass counts as two. The trimaps are the ground truth
of foreground AUROC and pointing game; their undecided border is left out.

All intermediate results are kept in ``--work``, so the script can be stopped and restarted at any time.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import faithful
import visualtokens
from budget import core_minutes
from visualtokens.bench import count_macs, count_parameters, machine
from visualtokens.data import Preprocess, read_image
from visualtokens.explain import METHODS, FaithfulnessEvaluator, Setting, overlay
from visualtokens.explain.baselines import make_method
from visualtokens.explain.foreground import find_mask, read_foreground
from visualtokens.studies.worker import use_explicit_attention
from visualtokens.tasks import Checkpoint
from visualtokens.train import TrainConfig, train

CROP, PHOTO = 64, 160  # pixels a side of training crops and of explained photos
MODEL = dict(
    channels=(32, 64, 128, 160),
    depths=(1, 1, 2, 1),
    heads=(1, 2, 4, 5),
    convolutions=((7, 4), (3, 2), (3, 1), (3, 2)),
    clusters=(32, 32, 32, 0),
)
CLASSES = ("background", "pet")
CROPS = {"train": 4000, "val": 1000}  # of each class
EXAMPLES = 5


def crops(pets: Path, split: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Crops ``(N, 64, 64, 3)``: background (label 0, at most 2% pet) and pets (label 1, at least half)."""
    rng = np.random.default_rng(len(split))
    found: dict[int, list[NDArray[np.uint8]]] = {0: [], 1: []}
    for path in sorted((pets / split).glob("*/*.jpg")):
        pixels = np.asarray(read_image(path))
        trimap = np.asarray(Image.open(find_mask(str(path), pets / "trimaps")))
        share = window_means(trimap != 2, CROP)
        for label, fits in ((0, share <= 0.02), (1, share >= 0.5)):
            rows, columns = np.nonzero(fits)
            for i in rng.permutation(len(rows))[:12]:
                top, left = rows[i], columns[i]
                found[label].append(pixels[top : top + CROP, left : left + CROP])
    count = min(CROPS[split], *map(len, found.values()))
    chosen = [found[label][i] for label in (0, 1) for i in rng.permutation(len(found[label]))[:count]]
    return np.stack(chosen), np.repeat([0, 1], count)


def window_means(values: NDArray[np.bool_], side: int) -> NDArray[np.float64]:
    """The mean of every ``side`` × ``side`` window, indexed by its upper left corner."""
    sums = np.pad(values.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    return (sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side] + sums[:-side, :-side]) / side**2


def train_model(pets: Path, work: Path, epochs: int, *, bf16: bool) -> dict[str, Any]:
    """Train the model in ``work/run``, or resume its training."""
    data = work / "pieces.npz"
    if not data.exists():
        arrays: dict[str, Any] = dict(classes=np.array(CLASSES))
        for split in CROPS:
            arrays[f"x_{split}"], arrays[f"y_{split}"] = crops(pets, split)
        np.savez(data, **arrays)
    out = work / "run"
    if bf16:
        use_explicit_attention()
    config = TrainConfig(
        model="paca_vit_nano",
        data=f"npz:{data}",
        out=str(out),
        epochs=epochs,
        size=CROP,
        batch=64,
        lr=2e-3,
        seed=0,
        augment="photo",
        model_args=MODEL,
        bf16=bf16,
        resume="auto",
    )
    began = time.process_time()
    result = train(config)
    if result.signal is not None:
        raise SystemExit(f"stopped by signal {result.signal}; run the command again to resume")
    return {
        "accuracy_on_pieces": result.accuracy,
        "epochs": epochs,
        "core_minutes_of_training": core_minutes(out, began=began),
        "accuracy_by_epoch": [round(row["val_accuracy"], 4) for row in result.history],
    }


def photos(pets: Path, count: int) -> list[Path]:
    """``count`` validation photos, as many of each breed as possible."""
    breeds = [sorted(folder.glob("*.jpg")) for folder in sorted((pets / "val").iterdir())]
    by_turn = [breed[i] for i in range(max(map(len, breeds))) for breed in breeds if i < len(breed)]
    return sorted(by_turn[:count])


def scoring(run_folder: Path, pets: Path, *, budget: int, steps: int) -> faithful.Work:
    """What a process evaluates photos with."""
    run = visualtokens.load(run_folder)
    preprocess = photo_preprocess(run)

    def read(path: Path) -> faithful.Item:
        image = read_image(path)
        mask = read_foreground(find_mask(str(path), pets / "trimaps"), preprocess, image.size)
        return preprocess(image), mask

    return faithful.Work(
        FaithfulnessEvaluator(run.model, Setting(preprocess, budget=budget), steps=steps), read
    )


def photo_preprocess(run: Checkpoint) -> Preprocess:
    """The model's preprocessing at the size of whole photos."""
    return replace(run.preprocess, size=(PHOTO, PHOTO))


def draw_examples(run: Checkpoint, pets: Path, count: int, path: Path) -> None:
    """Draw a few evenly spaced photos with their trimap and the map of every method."""
    from matplotlib.figure import Figure

    preprocess = photo_preprocess(run)
    methods = {name: make_method(name, run.model, Setting(preprocess)) for name in METHODS}
    paths = photos(pets, count)
    chosen = [paths[i] for i in np.linspace(0, len(paths) - 1, EXAMPLES + 2).astype(int)[1:-1]]
    fig = Figure(figsize=(2 * (len(methods) + 2), 2.1 * EXAMPLES), layout="constrained")
    axes = fig.subplots(EXAMPLES, len(methods) + 2)
    for number, (row, photo) in enumerate(zip(axes, chosen, strict=True)):
        image = read_image(photo)
        x, seen = preprocess(image), preprocess.resize(image, preprocess.crop_box(*image.size))
        mask = read_foreground(find_mask(str(photo), pets / "trimaps"), preprocess, image.size)
        with torch.inference_mode():
            target = int(run.model(x.unsqueeze(0)).argmax())
        panels: dict[str, Any] = {
            "photo": seen,
            "trimap": np.choose(mask + 1, (127, 0, 255)).astype(np.uint8),
        }
        for name, method in methods.items():
            heat = method(x, target)
            low, high = np.percentile(heat, (1, 99))
            panels[name] = overlay(seen, np.clip((heat - low) / max(high - low, 1e-12), 0, 1))
        for ax, (name, panel) in zip(row, panels.items(), strict=True):
            ax.imshow(np.asarray(panel), cmap="gray", vmin=0, vmax=255)
            ax.set_axis_off()
            if number == 0:
                ax.set_title(name, fontsize=11)
    fig.savefig(path, dpi=100, pil_kwargs={"quality": 88})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pets", type=Path, required=True, help="folder with train/, val/ and trimaps/")
    parser.add_argument(
        "--work", type=Path, default=Path("faithful_pets"), help="folder for intermediate results"
    )
    parser.add_argument("--save", type=Path, required=True, help="JSON file; figures are saved next to it")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16 mixed precision")
    parser.add_argument("--photos", type=int, default=300)
    parser.add_argument("--budget", type=int, default=64, help="forward passes of a method")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--randomised", type=int, default=60, help="photos of the randomisation check")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    training = train_model(options.pets, options.work, options.epochs, bf16=options.bf16)
    run = visualtokens.load(options.work / "run")
    make = partial(scoring, options.work / "run", options.pets, budget=options.budget, steps=options.steps)
    chosen = photos(options.pets, options.photos)
    rows = faithful.evaluate(make, chosen, options.work / "scores.jsonl", methods=list(METHODS))
    found = faithful.collect(rows)
    print(faithful.show(found))
    result = {
        "command": f"python benchmarks/faithful_pets.py --pets {options.pets.name} --epochs {options.epochs} "
        f"{'--bf16 ' if options.bf16 else ''}--photos {options.photos} --budget {options.budget} "
        f"--steps {options.steps} --save {options.save}",
        "machine": machine(),
        **training,
        "parameters": count_parameters(run.model),
        "macs_of_a_photo": count_macs(run.model, (PHOTO, PHOTO)),
        "budget": options.budget,
        **faithful.summary(found),
    }
    if options.randomised:
        setting = Setting(photo_preprocess(run), budget=options.budget)
        spaced = chosen[:: -(-len(chosen) // options.randomised)]  # of all breeds
        images = [setting.preprocess(read_image(photo)) for photo in spaced]
        result["correlation_after_randomisation"] = faithful.after_randomisation(
            run.model, setting, images, list(METHODS)
        )
    faithful.save(result, found, options.save)
    examples = options.save.with_name(options.save.stem + "_examples.jpg")
    draw_examples(run, options.pets, options.photos, examples)


if __name__ == "__main__":
    main()
