"""The main job from end to end, in two minutes: train, evaluate, explain, report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from visualtokens.bench import count_macs, count_parameters, interleave
from visualtokens.data import ImageDataset, Preprocess, create_loader, open_dataset
from visualtokens.explain import explain
from visualtokens.report import Report, Sample, write_report
from visualtokens.train import Checkpoint, TrainConfig, TrainResult, load_checkpoint, train

CONFIG = dict(model="paca_vit_nano", data="digits", epochs=30, batch=64, lr=2e-3, seed=0)
SAMPLES = 6


@dataclass(frozen=True)
class DemoResult:
    accuracy: float  # on the images the model never saw
    images: int  # how many of them
    train_images_per_second: float
    images_per_second: float  # prediction
    seconds: float  # training, evaluation after every epoch included
    report: Path


def run(out: str | Path, *, epochs: int | None = None, progress: bool | None = None) -> DemoResult:
    """Train a small PaCa-ViT on handwritten digits and write ``report.html`` into ``out``.

    An earlier demonstration in the folder is replaced.
    """
    options = CONFIG if epochs is None else CONFIG | dict(epochs=epochs)
    result = train(TrainConfig(out=str(out), overwrite=True, **options), progress=progress)  # type: ignore[arg-type]
    if result.signal is not None or result.accuracy is None or result.confusion is None:
        raise KeyboardInterrupt  # the model so far is saved; a report would be about half of the job
    checkpoint = load_checkpoint(out)
    digits = open_dataset("digits", "val")
    speed = _images_per_second(checkpoint.model, checkpoint.preprocess)
    report = Report(
        title="Handwritten digits, seen as a few tokens",
        summary=_figures(result, checkpoint, speed, images=len(digits)),
        history=[row | {"accuracy": row["val_accuracy"]} for row in result.history],
        confusion=result.confusion.numpy(),
        classes=result.classes,
        samples=_samples(checkpoint, digits),
        notes=[
            "The images are scikit-learn's 1,797 scanned digits of 8 × 8 pixels, enlarged to 32 × 32; four "
            "fifths were learned from, the figures are of the others.",
            "The heat maps are those of the last layer that groups the image. A cluster is hidden by "
            "darkening its places, which on a black background removes nothing but ink.",
        ],
        command=f"vtok demo --out {out}",
    )
    return DemoResult(
        accuracy=result.accuracy,
        images=len(digits),
        train_images_per_second=result.images_per_second,
        images_per_second=speed,
        seconds=result.seconds,
        report=write_report(Path(out) / "report.html", report),
    )


def _figures(
    result: TrainResult, checkpoint: Checkpoint, speed: float, *, images: int
) -> list[tuple[str, str, str]]:
    parameters = count_parameters(checkpoint.model)
    macs = count_macs(checkpoint.model, checkpoint.preprocess.size)
    wrong = round(images * (1 - (result.accuracy or 0)))
    return [
        ("Accuracy", f"{result.accuracy:.1%}", f"{wrong} of {images} unseen images named wrongly"),
        ("Training", f"{result.seconds:.0f} s", f"{result.images_per_second:,.0f} images/s on this machine"),
        ("Images/s", f"{speed:,.0f}", "naming digits, in batches of 64"),
        ("Parameters", f"{parameters / 1e6:.2f} M", f"{CONFIG['model']}, {macs / 1e6:.0f} M multiply-adds"),
    ]


def _images_per_second(model: nn.Module, preprocess: Preprocess, *, batch: int = 64) -> float:
    images = torch.randn(batch, 3, *preprocess.size)
    with torch.inference_mode():
        timings = interleave({"model": lambda: model(images)}, rounds=5)
    return timings.rate("model", batch).median


def _samples(checkpoint: Checkpoint, digits: ImageDataset) -> list[Sample]:
    """The first mistakes, if there are any, then the first image of one class after the other."""
    predictions = _predictions(checkpoint, digits)
    labels = [digits[i][1] for i in range(len(digits))]
    mistakes = [i for i, label in enumerate(labels) if predictions[i] != label][: SAMPLES // 3]
    first_of_class = [labels.index(label) for label in sorted(set(labels))]
    chosen = list(dict.fromkeys(mistakes + first_of_class))[:SAMPLES]
    return [
        Sample(
            explain(
                checkpoint.model, digits[i][0], preprocess=checkpoint.preprocess, classes=checkpoint.classes
            ),
            truth=labels[i],
            name=digits.path(i),
        )
        for i in chosen
    ]


def _predictions(checkpoint: Checkpoint, digits: ImageDataset) -> list[int]:
    loader = create_loader(digits, checkpoint.preprocess, batch=64, train=False)
    with torch.inference_mode():
        return [int(p) for batch in loader for p in checkpoint.model(batch.images).argmax(1)]
