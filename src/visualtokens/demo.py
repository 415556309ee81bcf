"""``vtok demo``: train, evaluate and explain a small model on handwritten digits, in two minutes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from visualtokens.bench import count_macs, count_parameters, interleave
from visualtokens.checkpoint import load
from visualtokens.data import ImageDataset, Preprocess, open_dataset
from visualtokens.explain import explain
from visualtokens.explain.html import KeyFigure
from visualtokens.report import Report, Sample, write_report
from visualtokens.tasks import Checkpoint
from visualtokens.tasks.classify import predict
from visualtokens.train import TrainConfig, TrainResult, train

CONFIG = dict(model="paca_vit_nano", data="digits", epochs=30, batch=64, lr=2e-3, seed=0)
SAMPLES = 6
NOTES = (
    "The data are scikit-learn's 1,797 scanned digits of 8 × 8 pixels, resized to 32 × 32. Four fifths are "
    "the training set; all figures are for the rest, the validation set.",
    "The heat maps show the clusters of the model's last grouping. On the black background, masking a "
    "cluster with black removes only ink.",
)


@dataclass(frozen=True)
class DemoResult:
    """The figures of the demo, and where its report is."""

    accuracy: float  # on the validation set
    images: int  # of the validation set
    train_images_per_second: float
    images_per_second: float  # of inference
    seconds: float  # of training, with the evaluation after every epoch
    report: Path


def run(out: str | Path, *, epochs: int | None = None, progress: bool | None = None) -> DemoResult:
    """Train a small PaCa-ViT on handwritten digits and write ``report.html`` to ``out``.

    An earlier demo in the folder is overwritten.
    """
    options = CONFIG if epochs is None else CONFIG | dict(epochs=epochs)
    result = train(TrainConfig(out=str(out), overwrite=True, **options), progress=progress)  # type: ignore[arg-type]
    if result.signal is not None or result.accuracy is None or result.confusion is None:
        raise KeyboardInterrupt  # the checkpoint is saved; a report on half a run would mislead
    checkpoint = load(out)
    digits = open_dataset("digits", "val")
    speed = _images_per_second(checkpoint.model, checkpoint.preprocess)
    report = Report(
        title="Handwritten digits with PaCa-ViT",
        summary=_key_figures(result, checkpoint, speed, images=len(digits)),
        history=[row | {"accuracy": row["val_accuracy"]} for row in result.history],
        confusion=result.confusion.numpy(),
        classes=result.classes,
        samples=_samples(checkpoint, digits),
        notes=NOTES,
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


def _key_figures(
    result: TrainResult, checkpoint: Checkpoint, speed: float, *, images: int
) -> list[KeyFigure]:
    parameters = count_parameters(checkpoint.model)
    macs = count_macs(checkpoint.model, checkpoint.preprocess.size)
    wrong = round(images * (1 - (result.accuracy or 0)))
    return [
        ("Accuracy", f"{result.accuracy:.1%}", f"{wrong} of {images} validation images misclassified"),
        ("Training", f"{result.seconds:.0f} s", f"{result.images_per_second:,.0f} images/s on this machine"),
        ("Inference", f"{speed:,.0f}", "images/s, in batches of 64"),
        ("Parameters", f"{parameters / 1e6:.2f} M", f"{CONFIG['model']}, {macs / 1e6:.0f} M multiply-adds"),
    ]


def _images_per_second(model: nn.Module, preprocess: Preprocess, *, batch: int = 64) -> float:
    images = torch.randn(batch, 3, *preprocess.size)
    with torch.inference_mode():
        timings = interleave({"model": lambda: model(images)}, rounds=5)
    return timings.rate("model", batch).median


def _samples(checkpoint: Checkpoint, digits: ImageDataset) -> list[Sample]:
    """Explanations of the first misclassified images, then of the first image of each class."""
    model, preprocess, classes = checkpoint.model, checkpoint.preprocess, checkpoint.classes

    def misclassified(i: int) -> bool:
        image, label = digits[i]
        prediction = predict(model, image, preprocess=preprocess, classes=classes)
        return int(prediction.probabilities.argmax()) != label

    mistakes = list(islice(filter(misclassified, range(len(digits))), SAMPLES // 3))
    labels = [digits[i][1] for i in range(len(digits))]
    first_of_class = [labels.index(label) for label in sorted(set(labels))]
    chosen = list(dict.fromkeys(mistakes + first_of_class))[:SAMPLES]
    return [
        Sample(
            explain(model, digits[i][0], preprocess=preprocess, classes=classes),
            truth=labels[i],
            name=digits.path(i),
        )
        for i in chosen
    ]
