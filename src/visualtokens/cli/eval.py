"""``vtok eval``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from visualtokens.cli import detect, segment
from visualtokens.cli.output import table, unreadable_as_json, warn_unreadable
from visualtokens.cli.parse import Result, Verb
from visualtokens.cli.tasks import refuse_others, require_classes, task_of

if TYPE_CHECKING:
    from visualtokens.tasks.classify import Evaluation

SHOWN = 30  # classes in the table
BATCH = 64


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Measure how well a checkpoint does on a dataset: labels, pixels or objects, as it was trained."""

    checkpoint: str
    """Folder that `vtok train --out` wrote."""

    data: str
    """Images to judge it on: digits, digit_scenes, folder:PATH or npz:FILE. Of a segmentation model:
    digit_scenes, masks:, pets:, ade20k:, cocostuff: or lip:PATH; of a detector: digit_scenes, coco:PATH."""

    split: Literal["train", "val"] = "val"
    """Which part of the data."""

    batch: int | None = None
    """Images per step; by default 64, 16 of a segmentation model, 4 of a detector."""

    size: int | None = None
    """Side of the square images the model sees, of a detector the short side of each; by default as in
    training."""

    scales: list[float] = field(default_factory=list)
    """Of a segmentation model: sizes to look at each image in, such as 0.75 1 1.25; the mean counts."""

    flip: bool = False
    """Of a segmentation model: look at the mirror image, too."""

    window: int | None = None
    """Of a segmentation model: side of a window that slides over the image; by default it sees it whole."""

    workers: int = 0
    """Processes that prepare images; 0 prepares them in this process."""

    device: str = "auto"
    """Where to compute: auto (a GPU if there is one), cpu, cuda, cuda:1, mps."""


def run(config: EvalConfig) -> Result:
    """Evaluate as the checkpoint was trained."""
    task = task_of(config.checkpoint)
    refuse_others(config, task, {"segment": ("scales", "flip", "window")})
    if task == "segment":
        return segment.evaluate(config)
    return detect.evaluate(config) if task == "detect" else _classify(config)


def _classify(config: EvalConfig) -> Result:
    from visualtokens.data import create_loader, open_dataset
    from visualtokens.tasks.classify import evaluate
    from visualtokens.train import load_checkpoint, pick_device

    checkpoint = load_checkpoint(config.checkpoint)
    dataset = open_dataset(config.data, config.split)
    require_classes(config.data, dataset.classes, config.checkpoint, checkpoint.classes)
    preprocess = checkpoint.preprocess
    if config.size is not None:
        preprocess = replace(preprocess, size=(config.size, config.size))
    batch = BATCH if config.batch is None else config.batch
    loader = create_loader(dataset, preprocess, batch=batch, train=False, workers=config.workers)
    model = checkpoint.model.to(pick_device(config.device))
    evaluation = evaluate(model, loader, classes=len(checkpoint.classes))
    warn_unreadable(evaluation.unreadable)
    document = {
        "checkpoint": config.checkpoint,
        "data": config.data,
        "split": config.split,
        "accuracy": evaluation.accuracy,
        "loss": evaluation.loss,
        "images": evaluation.images,
        "classes": checkpoint.classes,
        "confusion": evaluation.confusion.tolist(),
        "unreadable": unreadable_as_json(evaluation.unreadable),
    }
    return Result(_text(evaluation, checkpoint.classes), document)


def _text(evaluation: Evaluation, classes: list[str]) -> str:
    counts = evaluation.confusion  # (classes, classes)
    right = int(counts.diagonal().sum())
    share = f"{right} of {evaluation.images} images"
    head = f"accuracy {evaluation.accuracy:.1%} ({share}), loss {evaluation.loss:.3f}"
    judged = [i for i in range(len(classes)) if counts[i].sum() > 0]
    worst = sorted(judged, key=lambda i: (counts[i, i] / counts[i].sum()).item())[:SHOWN]
    rows = [_row(classes, i, counts[i].tolist()) for i in worst]
    more = len(judged) - len(worst)
    foot = f"\n… and {more} classes that do better; --json has all" if more else ""
    return (
        f"{head}\n\n" + table(rows, header=("class", "images", "right", "mistaken for"), right=(1, 2)) + foot
    )


def _row(classes: list[str], truth: int, counts: list[int]) -> tuple[str, str, str, str]:
    """One class: how many images, the share labelled right, and the two commonest mistakes."""
    total = sum(counts)
    wrong = sorted(((n, i) for i, n in enumerate(counts) if n and i != truth), key=lambda pair: -pair[0])
    mistakes = ", ".join(f"{_short(classes[i])} ({n}×)" for n, i in wrong[:2])
    return _short(classes[truth]), str(total), f"{counts[truth] / total:.1%}", mistakes


def _short(name: str) -> str:
    return name if len(name) <= 24 else name[:23] + "…"


VERB = Verb(config=EvalConfig, run=run, example="vtok eval --checkpoint run/ --data digits")
