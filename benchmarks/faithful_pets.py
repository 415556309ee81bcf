"""How faithful the clusters of a small PaCa-ViT are on photos of pets, beside other explanations.

    python benchmarks/faithful_pets.py --pets ../shared/data/pets --save results/faithful_pets.json

The model learns to tell pieces of the training photos that show the pet from pieces of background: squares of
64 pixels, by the trimaps, as many of each. Both are cut at the photo's own scale and varied alike, so nothing
but the content tells them apart. It then looks at the middle of whole validation photos, 160 pixels a side,
which it calls "pet" or "background", and every method explains that answer. The trimaps say what a map should
have found: foreground AUROC and pointing game leave the undecided border out.

Everything is kept in ``--work``, so the script can be stopped at any time and started again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from budget import core_minutes
from visualtokens.bench import count_macs, count_parameters, machine
from visualtokens.cli.output import table
from visualtokens.data import Preprocess, read_image
from visualtokens.explain import METHODS, Faithfulness, Judge, Score, Setting, gather, overlay
from visualtokens.explain.baselines import make_method
from visualtokens.explain.faithfulness import HEADER
from visualtokens.explain.importance import find_mask, read_mask
from visualtokens.train import Checkpoint, TrainConfig, load_checkpoint, train

CROP, PHOTO = 64, 160  # pixels a side, of what is learned and of what is explained
MODEL = dict(
    channels=(32, 64, 128, 160),
    depths=(1, 1, 2, 1),
    heads=(1, 2, 4, 5),
    convolutions=((7, 4), (3, 2), (3, 1), (3, 2)),
    clusters=(32, 32, 32, 0),
)
CLASSES = ("background", "pet")
PIECES = {"train": 4000, "val": 1000}  # of each class
EXAMPLES = 5


def pieces(pets: Path, split: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Squares ``(N, 64, 64, 3)`` without any pet (label 0), and at least half full of one (label 1)."""
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
    count = min(PIECES[split], *map(len, found.values()))
    chosen = [found[label][i] for label in (0, 1) for i in rng.permutation(len(found[label]))[:count]]
    return np.stack(chosen), np.repeat([0, 1], count)


def window_means(values: NDArray[np.bool_], side: int) -> NDArray[np.float64]:
    """The mean of every ``side`` × ``side`` window, by its upper left corner."""
    sums = np.pad(values.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    return (sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side] + sums[:-side, :-side]) / side**2


def learn(pets: Path, work: Path, epochs: int) -> dict[str, Any]:
    """Train, or go on training, the model in ``work/run``."""
    data = work / "pieces.npz"
    if not data.exists():
        arrays: dict[str, Any] = dict(classes=np.array(CLASSES))
        for split in PIECES:
            arrays[f"x_{split}"], arrays[f"y_{split}"] = pieces(pets, split)
        np.savez(data, **arrays)
    out = work / "run"
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
        resume="auto",
    )
    began = time.process_time()
    result = train(config)
    if result.signal is not None:
        raise SystemExit(f"stopped by signal {result.signal}; start again to go on")
    return {
        "accuracy_on_pieces": result.accuracy,
        "epochs": epochs,
        "core_minutes_of_training": core_minutes(out, began=began),
        "accuracy_by_epoch": [round(row["val_accuracy"], 4) for row in result.history],
    }


def photos(pets: Path, count: int) -> list[Path]:
    """So many validation photos, the same number of each breed as far as that goes."""
    breeds = [sorted(folder.glob("*.jpg")) for folder in sorted((pets / "val").iterdir())]
    turns = [breed[i] for i in range(max(map(len, breeds))) for breed in breeds if i < len(breed)]
    return sorted(turns[:count])


def judged(run: Checkpoint, pets: Path, work: Path, count: int, steps: int) -> Iterator[dict[str, Any]]:
    """The scores of each photo; those measured before are read from ``work/scores.jsonl``."""
    file = work / "scores.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {row["photo"]: row for row in rows}
    preprocess = whole(run)
    judge = Judge(run.model, Setting(preprocess), steps=steps)
    for path in tqdm(photos(pets, count), desc="judge"):
        if path.name not in known:
            image = read_image(path)
            mask = read_mask(find_mask(str(path), pets / "trimaps"), preprocess, image.size)
            x = preprocess(image)
            with torch.inference_mode():
                pet = float(run.model(x.unsqueeze(0)).softmax(1)[0, 1])
            scores = {name: score.to_dict() for name, score in judge(x, mask).items()}
            known[path.name] = {"photo": path.name, "pet": pet, "scores": scores}
            with file.open("a") as out:
                out.write(json.dumps(known[path.name]) + "\n")
        yield known[path.name]


def whole(run: Checkpoint) -> Preprocess:
    return replace(run.preprocess, size=(PHOTO, PHOTO))


def summary(run: Checkpoint, rows: list[dict[str, Any]], found: Faithfulness) -> dict[str, Any]:
    methods = found.to_dict()
    for means in methods.values():
        for which in ("deletion", "insertion"):
            means[f"{which}_curve"] = [round(value, 4) for value in means[f"{which}_curve"]]
    return {
        "photos": len(rows),
        "called_pet": sum(row["pet"] > 0.5 for row in rows) / len(rows),
        "parameters": count_parameters(run.model),
        "macs_of_a_photo": count_macs(run.model, (PHOTO, PHOTO)),
        "methods": methods,
    }


def draw_examples(run: Checkpoint, pets: Path, count: int, path: Path) -> None:
    """A few photos, spread evenly, with their trimap and the map of every method."""
    from matplotlib.figure import Figure

    preprocess = whole(run)
    methods = {name: make_method(name, run.model, Setting(preprocess)) for name in METHODS}
    paths = photos(pets, count)
    chosen = [paths[i] for i in np.linspace(0, len(paths) - 1, EXAMPLES + 2).astype(int)[1:-1]]
    fig = Figure(figsize=(2 * (len(methods) + 2), 2.1 * EXAMPLES), layout="constrained")
    axes = fig.subplots(EXAMPLES, len(methods) + 2)
    for number, (row, photo) in enumerate(zip(axes, chosen, strict=True)):
        image = read_image(photo)
        x, seen = preprocess(image), preprocess.resize(image, preprocess.crop_box(*image.size))
        mask = read_mask(find_mask(str(photo), pets / "trimaps"), preprocess, image.size)
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
    fig.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pets", type=Path, required=True, help="folder with train/, val/ and trimaps/")
    parser.add_argument(
        "--work", type=Path, default=Path("faithful_pets"), help="what is kept between starts"
    )
    parser.add_argument("--save", type=Path, required=True, help="JSON file; pictures are put beside it")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--photos", type=int, default=148)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    learned = learn(options.pets, options.work, options.epochs)
    run = load_checkpoint(options.work / "run")
    rows = list(judged(run, options.pets, options.work, options.photos, options.steps))
    found = gather({name: Score.from_dict(s) for name, s in row["scores"].items()} for row in rows)
    print(table(found.rows(), header=HEADER, right=(1, 2, 3, 4)))
    result = {
        "command": f"python benchmarks/faithful_pets.py --pets {options.pets.name} --epochs {options.epochs} "
        f"--photos {options.photos} --steps {options.steps} --save {options.save}",
        "machine": machine(),
        **learned,
        **summary(run, rows, found),
    }
    options.save.write_text(json.dumps(result, indent=1) + "\n")
    found.plot().savefig(options.save.with_suffix(".png"), dpi=130)
    examples = options.save.with_name(options.save.stem + "_examples.png")
    draw_examples(run, options.pets, options.photos, examples)


if __name__ == "__main__":
    main()
