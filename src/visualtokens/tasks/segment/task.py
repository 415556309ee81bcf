"""Segmentation as a task of the training engine, and its models from checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from visualtokens.data import Loader
from visualtokens.data.segmentation import SegmentationDataset
from visualtokens.data.segmentation_loader import SegmentBatch, create_segment_loader
from visualtokens.data.segmentation_transforms import IGNORE, SegmentAugment, SegmentPreprocess
from visualtokens.errors import UserError
from visualtokens.tasks.segment.create import Segmenter, build
from visualtokens.tasks.segment.evaluate import SegmentEvaluation, SegmentLoss, evaluate, loss_of
from visualtokens.tasks.segment.inference import Inference
from visualtokens.tasks.task import Loading, Loss, Task

FIRST_WEIGHTS = "pretrained"  # fetches a file: where a model starts is no part of it


class Segment(Task[SegmentBatch, SegmentEvaluation]):
    """Train a model that gives every pixel a class."""

    name = "segment"
    score = "miou"

    def __init__(
        self,
        model: Segmenter,
        *,
        head: str,
        model_args: Mapping[str, Any],
        train_set: SegmentationDataset,
        val_set: SegmentationDataset,
        preprocess: SegmentPreprocess,
        augment: SegmentAugment,
        loss: SegmentLoss,
        inference: Inference | None = None,
    ) -> None:
        self.classes = train_set.classes
        if len(self.classes) < 2:
            raise UserError(f"{train_set.spec} has {len(self.classes)} class; to tell apart there must be 2")
        self.model = model
        self.images = (len(train_set), len(val_set))
        self.train_set, self.val_set = train_set, val_set
        self.preprocess, self.augment = preprocess, augment
        self.options, self.inference = loss, inference
        self.weights = loss.weights(self.classes)
        self._description = describe(head, classes=self.classes, preprocess=preprocess, model_args=model_args)

    def train_loader(self, loading: Loading) -> Loader[SegmentBatch]:
        return self._loader(self.train_set, self.augment, loading)

    def val_loader(self, loading: Loading) -> Loader[SegmentBatch]:
        return self._loader(self.val_set, None, loading)

    def _loader(
        self, dataset: SegmentationDataset, augment: SegmentAugment | None, loading: Loading
    ) -> Loader[SegmentBatch]:
        return create_segment_loader(
            dataset,
            self.preprocess,
            batch=loading.batch,
            train=augment is not None,
            seed=loading.seed,
            workers=loading.workers,
            augment=augment or "none",
            share=loading.share,
            pin_memory=loading.pin_memory,
        )

    def loss(self, model: nn.Module, batch: SegmentBatch, *, rng: np.random.Generator) -> Loss:
        said = model(batch.images)
        logits, second = said if isinstance(said, tuple) else (said, None)  # (B, classes, H, W)
        value = self._cross_entropy(logits, batch.masks)
        if second is not None:
            value = value + self.options.auxiliary * self._cross_entropy(second, batch.masks)
        asked = batch.masks != IGNORE
        right = ((logits.argmax(1) == batch.masks) & asked).sum() / asked.sum().clamp_min(1)
        return Loss(value, {"pixel_accuracy": right * len(batch)})

    def _cross_entropy(self, logits: Tensor, masks: Tensor) -> Tensor:
        return loss_of(logits, masks, weights=self.weights, smoothing=self.options.smoothing)

    def evaluate(
        self, model: nn.Module, batches: Iterable[SegmentBatch], *, progress: bool | None
    ) -> SegmentEvaluation:
        return evaluate(model, batches, classes=self.classes, inference=self.inference, progress=progress)

    def describe(self) -> dict[str, Any]:
        return self._description

    def to(self, device: torch.device) -> None:
        if self.weights is not None:
            self.weights = self.weights.to(device)


def describe(
    head: str, *, classes: list[str], preprocess: SegmentPreprocess, model_args: Mapping[str, Any]
) -> dict[str, Any]:
    """What ``config.json`` says about a model, besides its task and how it was trained."""
    return {
        "architecture": head,
        "num_classes": len(classes),
        "label_names": list(classes),
        "model_args": {name: value for name, value in model_args.items() if name != FIRST_WEIGHTS},
        "preprocess": asdict(preprocess),
    }


def rebuild(config: Mapping[str, Any]) -> tuple[Segmenter, list[str], SegmentPreprocess]:
    """The model that :func:`describe` told about, without its weights; its classes and preprocessing."""
    try:
        head, names = str(config["architecture"]), [str(name) for name in config["label_names"]]
        model_args, seen = dict(config["model_args"]), dict(config["preprocess"])
        preprocess = SegmentPreprocess(
            size=tuple(seen["size"]),
            mean=tuple(seen["mean"]),
            std=tuple(seen["std"]),
            keep_ratio=seen["keep_ratio"],
            longest=seen["longest"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the configuration of the segmentation model is damaged: {error!r}") from error
    if FIRST_WEIGHTS in model_args:
        raise UserError(f"model_args may not hold {FIRST_WEIGHTS!r}; leave it out")
    return build(head, classes=len(names), model_args=model_args), names, preprocess
