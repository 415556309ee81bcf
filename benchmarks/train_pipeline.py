"""The overhead of a training run over the bare model: waiting for images, and the engine itself.

    python benchmarks/train_pipeline.py --save results/train_pipeline.json

Trains a model on a folder of generated JPEGs of ImageNet's size. Blocks of its steps alternate with blocks of
the bare loop (forward, backward and optimizer step on one fixed batch) with the same model and loss: once
with the engine's optimizer, which updates all weights in one kernel, and once with torch's default AdamW.
The first steps of each block are not counted, because their batches were prepared during the other blocks.

A last run gives the engine one prepared batch repeatedly, which leaves its own overhead. In the other runs,
the cores that train also decode images, which the bare loop does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from visualtokens.bench import machine
from visualtokens.data import Batch
from visualtokens.processes import Stop
from visualtokens.progress import Progress
from visualtokens.tasks.timm_models import build_model
from visualtokens.train import TrainConfig
from visualtokens.train.distributed import Team
from visualtokens.train.epoch import EpochStats, train_epoch
from visualtokens.train.run import Run
from visualtokens.train.step import StepResult, create_optimizer

CPU = torch.device("cpu")
SKIPPED = 3  # steps at the start of a block
CLASSES = 10


def make_folder(root: Path, count: int) -> str:
    """Write synthetic photographs of 500×375, coloured clouds with fine grain, about 90 kB each."""
    rng = np.random.default_rng(0)
    for split, images in (("train", count), ("val", CLASSES)):
        for i in range(images):
            folder = root / split / str(i % CLASSES)
            folder.mkdir(parents=True, exist_ok=True)
            clouds = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
            pixels = np.asarray(clouds.resize((500, 375), Image.Resampling.BICUBIC), dtype=np.int16)
            grain = rng.integers(-25, 26, (375, 500, 1), dtype=np.int16)
            image = Image.fromarray(np.clip(pixels + grain, 0, 255).astype(np.uint8))
            image.save(folder / f"{i}.jpg", quality=85)
    return f"folder:{root}"


class Ready:
    """A loader that repeats one prepared batch."""

    def __init__(self, batch: Batch, count: int) -> None:
        self.batch, self.count = batch, count

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        pass

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Batch]:
        return itertools.repeat(self.batch, self.count)


class Bare:
    """The bare loop: forward, backward and optimizer step on one fixed batch."""

    def __init__(self, config: TrainConfig, *, by_hand: bool) -> None:
        self.model = build_model(config.model, classes=CLASSES, model_args={}).train()
        by_default = torch.optim.AdamW(self.model.parameters(), lr=config.lr)
        self.optimizer = by_default if by_hand else create_optimizer(self.model, config)
        self.images = torch.randn(config.batch, 3, config.size or 224, config.size or 224)
        self.labels = torch.arange(config.batch) % CLASSES

    def step(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.images), self.labels, label_smoothing=0.1).backward()
        self.optimizer.step()


def measure(config: TrainConfig, *, block: int, ready: bool = False) -> dict[str, Any]:
    """Throughput of one epoch of the engine, alternating with blocks of the bare loops."""
    run = Run(config, device=CPU, team=Team(), progress=False)
    loader = Ready(next(iter(run.train_loader)), len(run.train_loader)) if ready else run.train_loader
    loops = {"bare": Bare(config, by_hand=False), "by_hand": Bare(config, by_hand=True)}
    stats = EpochStats()
    seconds: dict[str, list[float]] = {"engine": [], "bare": [], "by_hand": []}
    waited: list[float] = []
    before = (0.0, 0.0)

    def after_step(result: StepResult | None) -> None:
        nonlocal before
        place = (stats.steps - 1) % block
        if place >= SKIPPED:
            seconds["engine"].append(stats.seconds - before[0])
            waited.append(stats.waited - before[1])
        before = (stats.seconds, stats.waited)
        if place == block - 1:
            for name, loop in loops.items():
                for i in range(block):
                    began = time.perf_counter()
                    loop.step()
                    if i >= SKIPPED:
                        seconds[name].append(time.perf_counter() - began)

    train_epoch(
        run.learner,
        loader,
        epoch=0,
        stats=stats,
        bad=run.bad_train,
        team=run.team,
        stop=Stop(),
        progress=Progress("", total=len(loader), unit="steps", shown=False),
        after_step=after_step,
    )
    rates = {name: config.batch / statistics.median(times) for name, times in seconds.items()}
    return {
        "images": "ready" if ready else "decoded",
        "workers": config.workers,
        "engine_images_per_second": round(rates["engine"], 2),
        "bare_images_per_second": round(rates["bare"], 2),
        "by_hand_images_per_second": round(rates["by_hand"], 2),
        "engine_to_bare": round(rates["engine"] / rates["bare"], 4),
        "engine_to_by_hand": round(rates["engine"] / rates["by_hand"], 4),
        "waiting_for_images": round(sum(waited) / sum(seconds["engine"]), 4),
        "steps": len(seconds["engine"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="paca_vit_b0")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--block", type=int, default=13)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        data = make_folder(Path(folder) / "images", options.batch * options.block * options.blocks)
        config = TrainConfig(
            model=options.model,
            data=data,
            out=str(Path(folder) / "run"),
            batch=options.batch,
            size=options.size,
            augment="imagenet",
            device="cpu",
        )
        for workers in (*options.workers, None):
            given = dataclasses.replace(config, workers=workers or 0)
            results.append(measure(given, block=options.block, ready=workers is None))
            print(json.dumps(results[-1]), flush=True)
    if options.save:
        command = f"python benchmarks/train_pipeline.py --workers {' '.join(map(str, options.workers))}"
        document = dict(
            command=command,
            machine=machine(),
            model=options.model,
            size=options.size,
            batch=options.batch,
            results=results,
        )
        options.save.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
