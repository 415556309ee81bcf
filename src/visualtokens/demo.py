"""``vtok demo``: train, evaluate and explain a small model on handwritten digits, in two minutes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from visualtokens.bench import count_macs, count_parameters, interleave
from visualtokens.checkpoint import load
from visualtokens.data import ImageDataset, Preprocess, open_dataset
from visualtokens.errors import UserError
from visualtokens.explain import Origin, explain
from visualtokens.explain.html import KeyFigure
from visualtokens.report import Report, Sample, write_report
from visualtokens.tasks import Checkpoint
from visualtokens.tasks.classify import predict
from visualtokens.train import TrainConfig, TrainResult, train
from visualtokens.train.folder import changed_option, read_options

CONFIG = dict(model="paca_vit_nano", data="digits", epochs=30, batch=64, lr=2e-3, seed=0)
SAMPLES = 6
NOTES = (
    "The data are scikit-learn's 1,797 scanned digits of 8 × 8 pixels, resized to 32 × 32. Four fifths are "
    "the training set; all figures are for the rest, the validation set.",
    "The regions come from the clusters of the model's last grouping. Hidden regions are black, as is the "
    "background, so that hiding removes only ink.",
)


@dataclass(frozen=True)
class DemoResult:
    """The figures of the demo, and where its report is."""

    accuracy: float  # on the validation set
    images: int  # of the validation set
    train_images_per_second: float
    images_per_second: float  # of inference
    seconds: float  # of all training steps, also those before an interruption
    report: Path


def run(
    out: str | Path, *, epochs: int | None = None, progress: bool | None = None, today: date | None = None
) -> DemoResult:
    """Train a small PaCa-ViT on handwritten digits and write ``report.html`` to ``out``.

    The folder must be empty or hold a demo. An interrupted demo is resumed; of a finished one, the model is
    evaluated again and the report is written again. The report's date is ``today``, by default the
    current date.
    """
    options = CONFIG if epochs is None else CONFIG | dict(epochs=epochs)
    config = TrainConfig(out=str(out), resume="auto", **options)  # type: ignore[arg-type]
    _check_folder(config)
    result = train(config, progress=progress)
    if result.signal is not None or result.accuracy is None or result.confusion is None:
        raise KeyboardInterrupt  # the checkpoint is saved; a report on half a run would mislead
    seconds, train_speed = _training_time(result)
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
        origin=Origin(model=config.model, checkpoint=Path(out).resolve().name, date=today or date.today()),
    )
    return DemoResult(
        accuracy=result.accuracy,
        images=len(digits),
        train_images_per_second=train_speed,
        images_per_second=speed,
        seconds=seconds,
        report=write_report(Path(out) / "report.html", report),
    )


def _check_folder(config: TrainConfig) -> None:
    """Raise :class:`UserError` unless the output folder is empty or holds this demo."""
    out = Path(config.out)
    if not out.is_dir():
        return
    before = read_options(out)
    if before is None and any(not path.name.startswith(".vtok-") for path in out.iterdir()):
        raise UserError(f"{config.out!r} is not empty and holds no demo; give another --out")
    if before is not None and (changed_option(config, before) or before.get("epochs") != config.epochs):
        raise UserError(f"{config.out!r} holds another run; give another --out")


def _training_time(result: TrainResult) -> tuple[float, float]:
    """Return the seconds of all training steps, and the images per second in them."""
    seconds = sum(record["seconds"] for record in result.history)
    images = sum(record["seconds"] * record["images_per_second"] for record in result.history)
    return seconds, images / seconds


def _key_figures(
    result: TrainResult, checkpoint: Checkpoint, speed: float, *, images: int
) -> list[KeyFigure]:
    parameters = count_parameters(checkpoint.model)
    macs = count_macs(checkpoint.model, checkpoint.preprocess.size)
    wrong = round(images * (1 - (result.accuracy or 0)))
    seconds, train_speed = _training_time(result)
    return [
        ("Accuracy", f"{result.accuracy:.1%}", f"{wrong} of {images} validation images misclassified"),
        ("Training", f"{seconds:.0f} s", f"{train_speed:,.0f} images/s on this machine"),
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
            explain(model, digits[i][0], hide="black", preprocess=preprocess, classes=classes),
            truth=labels[i],
            name=digits.path(i),
        )
        for i in chosen
    ]
