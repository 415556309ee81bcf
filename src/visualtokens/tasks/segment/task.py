"""Segmentation as a task: models, data, loss and prediction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from visualtokens.data import Loader, Split, open_segmentation
from visualtokens.data.segmentation import (
    IGNORE,
    SEGMENT_PRESETS,
    SegmentationDataset,
    SegmentAugment,
    SegmentBatch,
    SegmentPreprocess,
    create_segment_loader,
)
from visualtokens.data.transforms import as_augment
from visualtokens.errors import UserError, unknown
from visualtokens.tasks.initialize import initialize_dense, read_initial
from visualtokens.tasks.options import CLASSIFICATION_ONLY, TaskOptions
from visualtokens.tasks.schema import check_colours, check_input
from visualtokens.tasks.segment.evaluation import SegmentEvaluation, SegmentLoss, evaluate, loss_of
from visualtokens.tasks.segment.inference import Inference, predict
from visualtokens.tasks.segment.models import Segmenter, build
from visualtokens.tasks.segment.prediction import Segmentation
from visualtokens.tasks.task import (
    Checkpoint,
    Loading,
    Loss,
    Task,
    Training,
    register_task,
)
from visualtokens.tasks.timm_models import has_fixed_size, preprocess_for

if TYPE_CHECKING:
    from visualtokens.explain import Subject

LOSS_ARGS = ("auxiliary", "class_weights")
BODY = "backbone.body."  # what the names of the backbone's weights start with


class Segment(Task):
    """One class per pixel. ``model`` is a head, ``model_args`` are those of ``segment.create``."""

    name = "segment"
    score = "miou"
    unused = CLASSIFICATION_ONLY
    eval_options = ("scales", "flip", "window")
    predict_options = ("scales", "flip", "window")
    pictures = ("overlay", "classes")
    eval_batch = 16

    def open(self, options: TaskOptions) -> SegmentTraining:
        train_set = open_segmentation(options.data, "train", **options.data_options)
        val_set = open_segmentation(options.data, "val", **options.data_options)
        initial = read_initial(options, model=options.backbone)
        model_args = initial.add_to_backbone(_model_args(options))
        model = build(options.model, classes=len(train_set.classes), model_args=model_args)
        notes = initialize_dense(
            model,
            initial,
            task=self.name,
            classes=train_set.classes,
            backbone=model.backbone,
            body=BODY,
            heads=(".classify.",),
        )
        own = replace(preprocess_for(model.backbone, size=options.size), **initial.statistics)
        preprocess = SegmentPreprocess(own.size, own.mean, own.std, keep_ratio=train_set.keep_ratio)
        return SegmentTraining(
            self,
            model,
            head=options.model,
            model_args=model_args,
            train_set=train_set,
            val_set=val_set,
            preprocess=preprocess,
            augment=as_augment(
                options.augment or ("digits" if options.shows_digits else "photo"), SEGMENT_PRESETS
            ),
            loss=_loss(options),
            inference=default_inference(model_args["backbone"], preprocess),
            notes=notes,
        )

    def check(self, config: Mapping[str, Any]) -> None:
        super().check(config)
        if "preprocess" not in config:
            raise UserError("its 'preprocess' is damaged: there is none")
        check_input(config["preprocess"], "preprocess", size="size", dims=2)
        if "label_colors" in config:
            check_colours(config["label_colors"], config["num_classes"])

    def build(self, config: Mapping[str, Any]) -> tuple[Segmenter, list[str], SegmentPreprocess]:
        head, classes, model_args = self.described(config)
        stored = config["preprocess"]
        try:
            preprocess = SegmentPreprocess(
                size=tuple(stored["size"]),
                mean=tuple(stored["mean"]),
                std=tuple(stored["std"]),
                keep_ratio=stored["keep_ratio"],
                longest=stored["longest"],
            )
        except KeyError as error:
            raise UserError(f"its 'preprocess' is damaged: it has no {error}") from error
        return build(head, classes=len(classes), model_args=model_args), classes, preprocess

    def open_data(
        self, checkpoint: Checkpoint, data: str, split: Split, /, **options: Any
    ) -> SegmentationDataset:
        return open_segmentation(data, split, **options)

    def loader(
        self, dataset: SegmentationDataset, preprocess: SegmentPreprocess, loading: Loading
    ) -> Loader[SegmentBatch]:
        return create_segment_loader(dataset, preprocess, train=False, **vars(loading))

    def evaluate(
        self,
        checkpoint: Checkpoint,
        batches: Iterable[SegmentBatch],
        *,
        scales: Sequence[float] = (),
        flip: bool = False,
        window: int | None = None,
        progress: bool | None = None,
    ) -> SegmentEvaluation:
        return evaluate(
            checkpoint.model,
            batches,
            classes=checkpoint.classes,
            inference=_inference(checkpoint, scales=scales, flip=flip, window=window),
            progress=progress,
        )

    def predict(
        self,
        checkpoint: Checkpoint,
        image: Image.Image,
        *,
        scales: Sequence[float] = (),
        flip: bool = False,
        window: int | None = None,
    ) -> Segmentation:
        labels = predict(
            checkpoint.model,
            image,
            preprocess=checkpoint.preprocess,
            classes=checkpoint.classes,
            inference=_inference(checkpoint, scales=scales, flip=flip, window=window),
        )
        return Segmentation(labels, checkpoint.classes, checkpoint.config.get("label_colors"))

    def subject(
        self,
        checkpoint: Checkpoint,
        image: Image.Image,
        *,
        target: int | None = None,
        against: int | None = None,
    ) -> Subject:
        from visualtokens.tasks.segment.subject import area_subject

        return area_subject(checkpoint, image, target=target, against=against)

    def columns(self, checkpoint: Checkpoint, *_: Any, **options: Any) -> dict[str, type]:
        return {"label": str, "share": float}


def _model_args(options: TaskOptions) -> dict[str, Any]:
    """Return ``model_args`` with the image size and the stochastic depth that other options set."""
    model_args = options.backbone_model_args()
    if not options.size or not has_fixed_size(model_args.get("backbone", "")):
        return model_args
    body = dict(model_args.get("backbone_args") or {})
    return model_args | {"backbone_args": body | {"img_size": options.size}}


def _loss(options: TaskOptions) -> SegmentLoss:
    for name in options.loss_args:
        if name not in LOSS_ARGS:
            raise unknown("loss_args of segmentation", name, LOSS_ARGS)
    return SegmentLoss(smoothing=options.label_smoothing, **options.loss_args)


def default_inference(backbone: str, preprocess: SegmentPreprocess) -> Inference:
    """Return the inference of a backbone; one with a fixed input size slides a window of that size."""
    return Inference(window=min(preprocess.size)) if has_fixed_size(backbone) else Inference()


def _inference(
    checkpoint: Checkpoint, *, scales: Sequence[float], flip: bool, window: int | None
) -> Inference:
    """Return the default inference of the checkpoint with the given options."""
    own = default_inference(checkpoint.config["model_args"]["backbone"], checkpoint.preprocess)
    return replace(
        own, scales=tuple(scales) or own.scales, flip=flip, window=own.window if window is None else window
    )


class SegmentTraining(Training[SegmentBatch]):
    """Data, model and loss of a segmentation run."""

    model: Segmenter

    def __init__(
        self,
        task: Segment,
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
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__(task, model, train_set=train_set, val_set=val_set, preprocess=preprocess)
        if len(self.classes) < 2:
            raise UserError(f"{train_set.spec} has {len(self.classes)} class; segmentation needs 2 or more")
        self.augment, self.options, self.inference, self.notes = augment, loss, inference, notes
        self.weights = loss.weights(self.classes)
        self._description = task.describe(head, classes=self.classes, model_args=model_args) | {
            "preprocess": asdict(preprocess)
        }
        if train_set.colours is not None:
            self._description["label_colors"] = [list(colour) for colour in train_set.colours]

    def train_loader(self, loading: Loading) -> Loader[SegmentBatch]:
        return create_segment_loader(
            self.train_set, self.preprocess, train=True, augment=self.augment, **vars(loading)
        )

    def loss(self, model: nn.Module, batch: SegmentBatch, *, rng: np.random.Generator) -> Loss:
        output = model(batch.images)
        logits, auxiliary = output if isinstance(output, tuple) else (output, None)  # (B, classes, H, W)
        value = self._cross_entropy(logits, batch.masks)
        if auxiliary is not None:
            value = value + self.options.auxiliary * self._cross_entropy(auxiliary, batch.masks)
        labelled = batch.masks != IGNORE
        correct = ((logits.argmax(1) == batch.masks) & labelled).sum() / labelled.sum().clamp_min(1)
        return Loss(value, {"pixel_accuracy": correct * len(batch)})

    def _cross_entropy(self, logits: Tensor, masks: Tensor) -> Tensor:
        return loss_of(logits, masks, weights=self.weights, smoothing=self.options.smoothing)

    def evaluate(
        self, model: nn.Module, batches: Iterable[SegmentBatch], *, progress: bool | None
    ) -> SegmentEvaluation:
        return evaluate(model, batches, classes=self.classes, inference=self.inference, progress=progress)

    def describe(self) -> dict[str, Any]:
        return self._description

    def heads(self) -> set[str]:
        return {name for name, _ in self.model.named_parameters() if not name.startswith(BODY)}

    def to(self, device: torch.device) -> None:
        if self.weights is not None:
            self.weights = self.weights.to(device)


register_task(Segment())
