"""Detection as a task of the training engine, and its models from checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import nn

from visualtokens.data import Loader
from visualtokens.data.detection import (
    DetectionBatch,
    DetectionDataset,
    Sizing,
    create_detection_loader,
    to_floats,
)
from visualtokens.errors import UserError
from visualtokens.tasks.detect.create import Detector, build
from visualtokens.tasks.detect.detections import to_target
from visualtokens.tasks.detect.evaluate import Evaluation, evaluate
from visualtokens.tasks.task import Loading, Loss, Task

FIRST_WEIGHTS = "pretrained"  # fetches a file: where a model starts is no part of it


class Detect(Task[DetectionBatch, Evaluation]):
    """Train a detector of objects."""

    name = "detect"
    score = "box_ap"

    def __init__(
        self,
        model: Detector,
        *,
        detector: str,
        model_args: Mapping[str, Any],
        train_set: DetectionDataset,
        val_set: DetectionDataset,
        sizing: Sizing,
    ) -> None:
        if val_set.classes != train_set.classes:
            raise UserError(
                f"{train_set.spec}: the classes of train and val must be the same, in the same order"
            )
        self.classes = train_set.classes
        self.model = model
        self.images = (len(train_set), len(val_set))
        self.train_set, self.val_set = train_set, val_set
        self.sizing = sizing
        self._description = describe(detector, classes=self.classes, model_args=model_args)

    def train_loader(self, loading: Loading) -> Loader[DetectionBatch]:
        return self._loader(self.train_set, self.sizing, loading)

    def val_loader(self, loading: Loading) -> Loader[DetectionBatch]:
        return self._loader(self.val_set, None, loading)

    def _loader(
        self, dataset: DetectionDataset, sizing: Sizing | None, loading: Loading
    ) -> Loader[DetectionBatch]:
        return create_detection_loader(
            dataset,
            sizing=sizing,
            batch=loading.batch,
            seed=loading.seed,
            workers=loading.workers,
            share=loading.share,
            pin_memory=loading.pin_memory,
        )

    def loss(self, model: nn.Module, batch: DetectionBatch, *, rng: np.random.Generator) -> Loss:
        images = [to_floats(image) for image in batch.images]
        losses = model(images, [to_target(objects) for objects in batch.objects])
        return Loss(
            sum(losses.values()), {name: value.detach() * len(batch) for name, value in losses.items()}
        )

    def evaluate(
        self, model: nn.Module, batches: Iterable[DetectionBatch], *, progress: bool | None
    ) -> Evaluation:
        return evaluate(model, batches, classes=len(self.classes), progress=progress)

    def describe(self) -> dict[str, Any]:
        return self._description


def describe(detector: str, *, classes: list[str], model_args: Mapping[str, Any]) -> dict[str, Any]:
    """What ``config.json`` says about a detector, besides its task and how it was trained."""
    return {
        "architecture": detector,
        "num_classes": len(classes),
        "label_names": list(classes),
        "model_args": {name: value for name, value in model_args.items() if name != FIRST_WEIGHTS},
    }


def rebuild(
    config: Mapping[str, Any], *, sides: Mapping[str, int] | None = None
) -> tuple[Detector, list[str]]:
    """The detector that :func:`describe` told about, without its weights, and its classes.

    ``sides`` are other values of ``short`` and ``long``.
    """
    try:
        detector, names = str(config["architecture"]), [str(name) for name in config["label_names"]]
        model_args = dict(config["model_args"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the configuration of the detector is damaged: {error!r}") from error
    if FIRST_WEIGHTS in model_args:
        raise UserError(f"model_args may not hold {FIRST_WEIGHTS!r}; leave it out")
    return build(detector, classes=len(names), model_args=model_args | dict(sides or {})), names
