"""``vtok eval``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from visualtokens.cli.output import log_header, unreadable_as_json, warn_unreadable
from visualtokens.cli.verb import Result, Verb, options_of_task
from visualtokens.progress import count
from visualtokens.tasks.options import DataOptions

# The other options depend on the task.
COMMON = ("checkpoint", "data", "val_share", "data_args", "split", "batch", "size", "workers", "device")


@dataclass(frozen=True, kw_only=True)
class EvalConfig(DataOptions):
    """Evaluate a checkpoint on a dataset, by the metrics of its task."""

    checkpoint: str
    """Checkpoint folder that `vtok train --out` wrote, or hf-hub:ORGANIZATION/NAME."""

    data: str
    """Images to evaluate on: digits, digit_scenes, folder:PATH, csv:FILE, parquet:FILE, npz:FILE, wds:PATH or
    hfds:NAME. For segmentation digit_scenes, masks:PATH, camvid:PATH, cityscapes:PATH, voc:PATH, pets:PATH,
    ade20k:PATH, cocostuff:PATH or lip:PATH; for detection digit_scenes, coco:PATH, yolo:PATH, voc:PATH,
    instances:PATH or pennfudan:PATH."""

    split: Literal["train", "val", "test"] = "val"
    """Split of the data: train, val or test."""

    batch: int | None = None
    """Images per step; by default 64, for segmentation 16, for detection 4."""

    size: int | None = None
    """Side of the square input images, for detection their short side; by default as in training."""

    scales: list[float] = field(default_factory=list)
    """Segmentation: average the predictions at these relative sizes, such as 0.75 1 1.25."""

    flip: bool = False
    """Segmentation: average with the prediction of the mirrored image."""

    window: int | None = None
    """Segmentation: side of a sliding window; by default the model sees the whole image."""

    workers: int = 0
    """Data loading processes; 0 loads in this process."""

    device: str = "auto"
    """Device: auto (an accelerator if there is one), cpu, cuda, cuda:1 or mps."""


def run(config: EvalConfig) -> Result:
    """Evaluate by the task of the checkpoint."""
    from visualtokens.checkpoint import load
    from visualtokens.tasks.evaluation import require_classes
    from visualtokens.tasks.task import Loading

    checkpoint = load(config.checkpoint, device=config.device)
    task, classes = checkpoint.task, checkpoint.classes
    options = options_of_task(config, task, common=COMMON, own=task.eval_options)
    if config.size is not None:
        checkpoint = task.resize(checkpoint, config.size)
    dataset = task.open_data(checkpoint, config.data, config.split, **config.data_options)
    require_classes(config.data, dataset.classes, config.checkpoint, classes)
    loading = Loading(batch=task.eval_batch if config.batch is None else config.batch, workers=config.workers)
    batches = task.loader(dataset, checkpoint.preprocess, loading)
    images = count(len(dataset), "image")
    log_header(
        config.checkpoint,
        checkpoint,
        data=f"{config.data}, split {config.split}, {images}",
        workers=config.workers,
    )
    evaluation = task.evaluate(checkpoint, batches, **options)
    warn_unreadable(evaluation.unreadable)
    document = {
        "checkpoint": config.checkpoint,
        "data": config.data,
        "split": config.split,
        **evaluation.to_dict(classes),
        "unreadable": unreadable_as_json(evaluation.unreadable),
    }
    return Result(evaluation.text(classes), document)


GROUPS = {
    "model": ("checkpoint",),
    "data": ("data", "split", "size"),
    "inference, for segmentation": ("scales", "flip", "window"),
    "hardware and speed": ("device", "batch", "workers"),
}
VERB = Verb(config=EvalConfig, run=run, example="vtok eval --checkpoint run/ --data digits", groups=GROUPS)
