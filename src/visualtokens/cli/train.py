"""``vtok train``."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from visualtokens.cli.output import unreadable_as_json, warn_unreadable
from visualtokens.cli.verb import Failure, Result, Verb, data_arguments
from visualtokens.progress import duration, rate
from visualtokens.tables import metric_name
from visualtokens.train.config import TrainConfig

if TYPE_CHECKING:
    from visualtokens.train import TrainResult


def run(config: TrainConfig) -> Result:
    """Train. The exit code is 128 plus the signal that interrupted the run, if one did."""
    from visualtokens.train import CannotSave, Diverged, train

    try:
        result = train(config)
    except (CannotSave, Diverged) as error:
        raise Failure(str(error)) from error
    if result.is_main:
        warn_unreadable(result.unreadable)
    document = {
        "out": result.out,
        "classes": result.classes,
        "accuracy": result.accuracy,
        "best": result.best,
        "metrics": result.metrics,
        "confusion": None if result.confusion is None else result.confusion.tolist(),
        "history": result.history,
        "seconds": result.seconds,
        "images_per_second": result.images_per_second,
        "data_wait": result.data_wait,
        "skipped": result.skipped,
        "unreadable": unreadable_as_json(result.unreadable),
        "signal": result.signal,
    }
    code = 0 if result.signal is None else 128 + result.signal
    return Result(_text(config, result), document, code, silent=not result.is_main)


def _text(config: TrainConfig, result: TrainResult) -> str:
    from visualtokens.train.folder import BEST

    name, score = metric_name(result.score), result.metrics.get(result.score)
    reached = "not evaluated yet" if score is None else f"val {name} {score:.1%}"
    spent = duration(result.seconds)
    if result.images_per_second:  # otherwise nothing was left to train
        waited = f"{result.data_wait:.1%} of the time waiting for images"
        spent += f", {rate(result.images_per_second, 1.0)}, {waited}"
    lines = [f"{config.model}: {reached} after {len(result.history)} of {config.epochs} epochs ({spent})"]
    scores = [record[f"val_{result.score}"] for record in result.history]
    if scores and max(scores) > scores[-1]:
        best = 1 + scores.index(max(scores))
        lines.append(f"best epoch {best}: val {name} {max(scores):.1%}, in {Path(result.out, BEST)}")
    checkpoint = f"--checkpoint {quote(result.out)}"
    lines += [
        f"saved in {result.out}",
        f"try: vtok eval {checkpoint} {data_arguments(config.data, config)}",
        f"try: vtok predict photo.jpg {checkpoint}",
    ]
    return "\n".join(lines)


GROUPS = {
    "data": ("data", "val_share", "data_args", "size", "max_bad_images"),
    "model": ("model", "task", "pretrained", "init", "freeze", "freeze_norms", "probe", "model_args"),
    "optimizer and schedule": (
        *("epochs", "batch", "seed", "optimizer", "optimizer_args", "lr", "schedule", "min_lr"),
        *("power", "decay_epochs", "decay_rate", "warmup_epochs", "warmup_lr", "layer_decay", "clip"),
        "max_bad_steps",
    ),
    "augmentation, loss and regularization": (
        *("augment", "auto_augment", "random_erasing", "repeats", "mixup", "cutmix", "label_smoothing"),
        *("loss_args", "teacher", "distill", "distill_temperature", "drop_path", "weight_decay", "ema"),
    ),
    "hardware and speed": (
        *("device", "workers", "accumulate", "bf16", "channels_last", "compile", "sync_bn"),
    ),
    "output and logging": ("out", "resume", "overwrite", "save_every", "keep", "log", "log_every"),
}
VERB = Verb(
    config=TrainConfig,
    run=run,
    groups=GROUPS,
    example="vtok train --model paca_vit_nano --data digits --out run/ --epochs 10",
)
