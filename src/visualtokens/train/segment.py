"""From the options of a run to a segmentation task."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm

from visualtokens.checkpoint import load_weights, read_config, require_task
from visualtokens.data.segmentation import open_segmentation
from visualtokens.data.segmentation_transforms import SegmentPreprocess, as_segment_augment
from visualtokens.errors import unknown
from visualtokens.tasks.segment import Inference, Segmenter, SegmentLoss
from visualtokens.tasks.segment.create import build
from visualtokens.tasks.segment.task import Segment, rebuild
from visualtokens.train.config import CLASSIFY_ONLY, TrainConfig, backbone_args, refuse, shows_digits
from visualtokens.train.tasks import start_dense


def open_segment(config: TrainConfig) -> Segment:
    """Open the data and build the model: ``model`` is a head, ``model_args`` those of ``segment.create``."""
    refuse(config, CLASSIFY_ONLY)
    train_set, val_set = (open_segmentation(config.data, split) for split in ("train", "val"))
    model_args = _model_args(config)
    model = build(config.model, classes=len(train_set.classes), model_args=model_args)
    if config.init is not None:
        start_dense(
            model,
            config.init,
            task="segment",
            classes=train_set.classes,
            body="backbone.body.",
            heads=(".classify.",),
        )
    preprocess = _preprocess(model, config.size, keep_ratio=train_set.keep_ratio)
    default = "digits" if shows_digits(config.data) else "photo"
    return Segment(
        model,
        head=config.model,
        model_args=model_args,
        train_set=train_set,
        val_set=val_set,
        preprocess=preprocess,
        augment=as_segment_augment(config.augment or default),
        loss=_loss(config),
        inference=_inference(model_args["backbone"], preprocess),
    )


def _loss(config: TrainConfig) -> SegmentLoss:
    known = ("auxiliary", "class_weights")
    for name in config.loss_args:
        if name not in known:
            raise unknown("loss_args of segmentation", name, known)
    return SegmentLoss(smoothing=config.label_smoothing, **config.loss_args)


def _model_args(config: TrainConfig) -> dict[str, Any]:
    """The arguments of the model, with those that other options decide."""
    model_args = backbone_args(config)
    if not config.size or not _has_one_size(model_args.get("backbone", "")):
        return model_args
    body = dict(model_args.get("backbone_args") or {})
    return model_args | {"backbone_args": body | {"img_size": config.size}}


def _has_one_size(backbone: str) -> bool:
    cfg = timm.get_pretrained_cfg(backbone) if timm.is_model(backbone) else None
    return cfg is not None and bool(cfg.fixed_input_size)


def _inference(backbone: str, preprocess: SegmentPreprocess) -> Inference:
    """A backbone of one size sees larger images through a window of that size."""
    return Inference(window=min(preprocess.size)) if _has_one_size(backbone) else Inference()


def _preprocess(model: Segmenter, size: int | None, *, keep_ratio: bool) -> SegmentPreprocess:
    cfg = model.backbone.pretrained_cfg
    height, width = (size, size) if size else cfg["input_size"][-2:]
    mean, std = tuple(cfg["mean"]), tuple(cfg["std"])
    return SegmentPreprocess((height, width), mean, std, keep_ratio=keep_ratio)


@dataclass(frozen=True)
class SegmentCheckpoint:
    """A model ready to use: in evaluation mode, with the names of its classes and its preprocessing."""

    model: Segmenter
    classes: list[str]
    preprocess: SegmentPreprocess
    config: dict[str, Any]  # what config.json holds

    @property
    def inference(self) -> Inference:
        """How the model looks at an image unless told otherwise."""
        return _inference(self.config["model_args"]["backbone"], self.preprocess)


def load_segmenter(path: str | Path) -> SegmentCheckpoint:
    """Read what a run with task=segment wrote. Runs no pickled code."""
    folder = Path(path)
    config = read_config(folder)
    require_task(folder, config, "segment")
    model, classes, preprocess = rebuild(config)
    load_weights(model, folder, config["architecture"])
    return SegmentCheckpoint(model.eval(), classes, preprocess, config)
