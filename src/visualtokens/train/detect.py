"""From the options of a run to a detection task, and its models from checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visualtokens.checkpoint import load_weights, read_config, require_task
from visualtokens.data.detection import Sizing, open_detection
from visualtokens.errors import UserError, unknown
from visualtokens.tasks.detect.create import DETECTORS, Detector, build
from visualtokens.tasks.detect.task import Detect, rebuild
from visualtokens.train.config import CLASSIFY_ONLY, TrainConfig, backbone_args, refuse, shows_digits
from visualtokens.train.tasks import start_dense

HEADS = (
    "_predictor.",
    "classification_head.cls_logits.",
)  # in the names of the weights that tell classes apart


def open_detect(config: TrainConfig) -> Detect:
    """Open the data and build the model: ``model`` is a detector, ``model_args`` those of ``detect.create``.

    ``size`` is the short side that images are seen at, ``augment`` none, photo or multiscale.
    """
    refuse(config, (*CLASSIFY_ONLY, "label_smoothing", "loss_args"))
    if config.model not in DETECTORS:
        raise unknown("detector", config.model, DETECTORS)
    masks = DETECTORS[config.model].has_masks
    train_set, val_set = (open_detection(config.data, split, masks=masks) for split in ("train", "val"))
    model_args = _model_args(config)
    model = build(config.model, classes=len(train_set.classes), model_args=model_args)
    if config.init is not None:
        start_dense(
            model,
            config.init,
            task="detect",
            classes=train_set.classes,
            body="backbone.body.body.",
            heads=HEADS,
        )
    augment = config.augment or ("none" if shows_digits(config.data) else "photo")
    fit = model.transform
    return Detect(
        model,
        detector=config.model,
        model_args=model_args,
        train_set=train_set,
        val_set=val_set,
        sizing=Sizing.preset(augment, short=fit.min_size[0], long=fit.max_size),
    )


def _model_args(config: TrainConfig) -> dict[str, Any]:
    """The arguments of the model, with those that other options decide."""
    model_args = backbone_args(config)
    if config.size is None:
        return model_args
    if "short" in model_args:
        raise UserError("size and model_args.short are the same; give one of them")
    return {"long": long_side(config.size), **model_args, "short": config.size}


def long_side(short: int) -> int:
    """The most that the long side may be: COCO's 1333 is 5/3 of its 800."""
    return round(short * 5 / 3)


@dataclass(frozen=True)
class DetectCheckpoint:
    """A detector ready to use: in evaluation mode, with the names of its classes."""

    model: Detector
    classes: list[str]
    config: dict[str, Any]  # what config.json holds


def load_detector(path: str | Path, *, size: int | None = None) -> DetectCheckpoint:
    """Read what a run with task=detect wrote. Runs no pickled code. ``size`` is another short side to see."""
    folder = Path(path)
    config = read_config(folder)
    require_task(folder, config, "detect")
    model, classes = rebuild(config, sides={} if size is None else {"short": size, "long": long_side(size)})
    load_weights(model, folder, config["architecture"])
    return DetectCheckpoint(model.eval(), classes, config)
