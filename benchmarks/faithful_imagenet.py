"""Faithfulness of heat maps on a pretrained ImageNet classifier, all methods with one budget.

    python benchmarks/faithful_imagenet.py --weights vit.safetensors --photos imagenet_val/ \
        [--save results/faithful_imagenet.json]

``--weights`` and ``--photos`` are those of ``benchmarks/imagenet_reduce.py``; photos with even numbers were
used for tuning, and the odd ones are reported, in a fixed random order. Every method explains the predicted
class with at most ``--budget`` forward passes; a backward pass counts as two. Scores are kept in a file next
to the result, ``…_scores.jsonl``, by photo and method, so the script can be stopped and continued at any
time, also on another machine or with more ``--methods``; ``--report`` only summarises them. A photo takes
about half a core-minute in bfloat16 on a processor with AVX512_BF16, and two in float32.
"""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import faithful
from imagenet_reduce import MODEL, load_model
from visualtokens.bench import machine
from visualtokens.data import Preprocess, read_image
from visualtokens.explain import METHODS, FaithfulnessEvaluator, Setting

PREPROCESS = Preprocess((224, 224), (0.5,) * 3, (0.5,) * 3, crop=0.9)
CHOSEN = [name for name in METHODS if name not in ("clusters", "shapley")]  # the model groups nothing


def odd_photos(folder: Path, count: int) -> list[Path]:
    """``count`` photos with odd numbers, in a random order that is always the same."""
    files = sorted(file for file in folder.glob("*.jpg") if int(file.stem) % 2)
    return [files[i] for i in np.random.default_rng(0).permutation(len(files))[:count]]


def load(weights: Path, dtype: str) -> nn.Module:
    return load_model(weights, getattr(torch, dtype)).requires_grad_(False)


def work(weights: Path, dtype: str, setting: Setting, **options: Any) -> faithful.Work:
    """What a process evaluates photos with."""
    evaluator = FaithfulnessEvaluator(load(weights, dtype), setting, **options)
    return faithful.Work(evaluator, lambda path: (PREPROCESS(read_image(path)), None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--save", type=Path, default=Path("results/faithful_imagenet.json"))
    parser.add_argument("--methods", nargs="*", default=CHOSEN)
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--budget", type=int, default=48)
    parser.add_argument("--steps", type=int, default=8, help="of the deletion and insertion curves")
    parser.add_argument("--groups", type=int, default=5, help="of SaCo")
    parser.add_argument("--randomised", type=int, default=30, help="photos of the randomisation check")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--workers", type=int, help="processes; by default one per core")
    parser.add_argument("--report", action="store_true", help="summarise the photos evaluated so far")
    options = parser.parse_args()
    file = options.save.with_name(f"{options.save.stem}_scores.jsonl")
    photos = odd_photos(options.photos, options.images)
    if options.report:
        known = faithful.read_rows(file)
        photos = [photo for photo in photos if set(options.methods) <= set(known.get(photo.name, {}))]
    setting = Setting(PREPROCESS, batch=8, budget=options.budget)
    curves = dict(methods=options.methods, steps=options.steps, groups=options.groups)
    make = partial(work, options.weights, options.dtype, setting, **curves)
    rows = faithful.evaluate(make, photos, file, methods=options.methods, workers=options.workers)
    found = faithful.collect(rows)
    print(faithful.show(found))
    chosen = [] if options.methods == CHOSEN else ["--methods", *options.methods]
    result = {
        "command": f"python benchmarks/faithful_imagenet.py --weights … --photos … --images {options.images} "
        f"--budget {options.budget} --steps {options.steps} --groups {options.groups} "
        f"{shlex.join(['--dtype', options.dtype, *chosen])} --save {options.save}",
        "machine": machine(),
        "model": MODEL,
        "dtype": options.dtype,
        "budget": options.budget,
        **faithful.summary(found),
    }
    if options.randomised:
        images = [PREPROCESS(read_image(photo)) for photo in photos[: options.randomised]]
        result["correlation_after_randomisation"] = faithful.after_randomisation(
            load(options.weights, options.dtype), setting, images, options.methods
        )
    faithful.save(result, found, options.save)


if __name__ == "__main__":
    main()
