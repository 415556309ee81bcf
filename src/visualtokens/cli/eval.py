"""``vtok eval``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from visualtokens.cli.report import table, unreadable_as_json, warn_unreadable
from visualtokens.cli.verb import Result, Verb
from visualtokens.errors import UserError

if TYPE_CHECKING:
    from visualtokens.tasks.classify import Evaluation

SHOWN = 30  # classes in the table


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Measure how well a checkpoint labels the images of a dataset."""

    checkpoint: str
    """Folder that `vtok train --out` wrote."""

    data: str
    """Images to judge it on: digits, digit_scenes, folder:PATH or npz:FILE."""

    split: Literal["train", "val"] = "val"
    """Which part of the data."""

    batch: int = 64
    """Images per step."""

    size: int | None = None
    """Side of the square images the model sees; by default the one it was trained with."""

    workers: int = 0
    """Processes that prepare images; 0 prepares them in this process."""

    device: str = "auto"
    """Where to compute: auto (a GPU if there is one), cpu, cuda, cuda:1, mps."""


def run(config: EvalConfig) -> Result:
    """Evaluate."""
    from visualtokens.data import create_loader, open_dataset
    from visualtokens.tasks.classify import evaluate
    from visualtokens.train import load_checkpoint, pick_device

    checkpoint = load_checkpoint(config.checkpoint)
    dataset = open_dataset(config.data, config.split)
    if dataset.classes != checkpoint.classes:
        raise UserError(
            f"{config.data} has {_brief(dataset.classes)}, but {config.checkpoint} was trained for "
            f"{_brief(checkpoint.classes)}; the classes must be the same, in the same order"
        )
    preprocess = checkpoint.preprocess
    if config.size is not None:
        preprocess = replace(preprocess, size=(config.size, config.size))
    loader = create_loader(dataset, preprocess, batch=config.batch, train=False, workers=config.workers)
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


def _brief(classes: list[str]) -> str:
    shown = ", ".join(classes[:3]) + (", …" if len(classes) > 3 else "")
    return f"{len(classes)} classes ({shown})"


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
