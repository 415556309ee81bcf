"""Detection as a task: models, data, loss and prediction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2 import functional

from visualtokens.data import Loader, Split, open_detection
from visualtokens.data.detection import (
    DetectionBatch,
    DetectionDataset,
    Sizing,
    create_detection_loader,
    to_floats,
)
from visualtokens.errors import UserError, unknown
from visualtokens.tasks.detect.detections import SCORE, ImageDetections, predict, to_target
from visualtokens.tasks.detect.evaluation import Evaluation, evaluate
from visualtokens.tasks.detect.models import DETECTORS, Detector, build
from visualtokens.tasks.initialize import initialize_dense
from visualtokens.tasks.options import CLASSIFICATION_ONLY, TaskOptions
from visualtokens.tasks.task import Checkpoint, Loading, Loss, Task, Training, register_task

# In the names of the weights that depend on the classes.
HEADS = ("_predictor.", "classification_head.cls_logits.")


class Detect(Task):
    """Boxes and masks of objects. ``model`` is a detector, ``model_args`` are those of ``detect.create``.

    ``size`` is the short side of the images, ``augment`` none, photo or multiscale.
    """

    name = "detect"
    score = "box_ap"
    unused = (*CLASSIFICATION_ONLY, "label_smoothing", "loss_args")
    predict_options = ("score",)
    pictures = ("objects",)
    eval_batch = 4

    def open(self, options: TaskOptions) -> DetectTraining:
        if options.model not in DETECTORS:
            raise unknown("detector", options.model, DETECTORS)
        masks = DETECTORS[options.model].has_masks
        train_set = _open_data(options.data, "train", masks, options.data_options)
        val_set = _open_data(options.data, "val", masks, options.data_options)
        model_args = _model_args(options)
        model = build(options.model, classes=len(train_set.classes), model_args=model_args)
        if options.init is not None:
            initialize_dense(
                model,
                options.init,
                task=self.name,
                classes=train_set.classes,
                body="backbone.body.body.",
                heads=HEADS,
            )
        augment = options.augment or ("none" if options.shows_digits else "photo")
        fit = model.transform
        return DetectTraining(
            self,
            model,
            detector=options.model,
            model_args=model_args,
            train_set=train_set,
            val_set=val_set,
            sizing=Sizing.preset(augment, short=fit.min_size[0], long=fit.max_size),
        )

    def build(self, config: Mapping[str, Any]) -> tuple[Detector, list[str], Any]:
        detector, classes, model_args = self.described(config)
        return build(detector, classes=len(classes), model_args=model_args), classes, to_input

    def input_size(self, model: nn.Module, preprocess: Any) -> str:
        transform: Any = model.transform
        return f"with a short side of {transform.min_size[0]} and a long side of up to {transform.max_size}"

    def resize(self, checkpoint: Checkpoint, size: int) -> Checkpoint:
        """Change the short side of the images that the model sees, in place."""
        transform: Any = checkpoint.model.transform
        transform.min_size, transform.max_size = (size,), long_side(size)
        return checkpoint

    def open_data(
        self, checkpoint: Checkpoint, data: str, split: Split, /, **options: Any
    ) -> DetectionDataset:
        return _open_data(data, split, bool(checkpoint.model.has_masks), options)

    def loader(self, dataset: DetectionDataset, preprocess: Any, loading: Loading) -> Loader[DetectionBatch]:
        return create_detection_loader(dataset, sizing=None, **vars(loading))

    def evaluate(
        self, checkpoint: Checkpoint, batches: Iterable[DetectionBatch], *, progress: bool | None = None
    ) -> Evaluation:
        return evaluate(checkpoint.model, batches, classes=len(checkpoint.classes), progress=progress)

    def predict(self, checkpoint: Checkpoint, image: Image.Image, *, score: float = SCORE) -> ImageDetections:
        return ImageDetections(predict(checkpoint.model, image, score=score), checkpoint.classes)

    def columns(self, checkpoint: Checkpoint, *_: Any, **options: Any) -> dict[str, type]:
        masks = {"mask_pixels": int} if checkpoint.model.has_masks else {}
        return {"label": str, "score": float} | dict.fromkeys(("x1", "y1", "x2", "y2"), float) | masks


def _open_data(data: str, split: Split, masks: bool, options: Mapping[str, Any]) -> DetectionDataset:
    if "masks" in options:
        raise UserError("data_args may not hold 'masks': the model decides whether they are needed")
    return open_detection(data, split, masks=masks, **options)


def to_input(image: Image.Image) -> Tensor:
    """Return an RGB image as detectors take it: ``(3, H, W)`` float32 from 0 to 1.

    They resize and normalise it themselves.
    """
    return to_floats(functional.pil_to_tensor(image.convert("RGB")))


def _model_args(options: TaskOptions) -> dict[str, Any]:
    """Return ``model_args`` with the image size and the stochastic depth that other options set."""
    model_args = options.backbone_model_args()
    if options.size is None:
        return model_args
    if "short" in model_args:
        raise UserError("size and model_args.short are the same option; give one of them")
    return {"long": long_side(options.size), **model_args, "short": options.size}


def long_side(short: int) -> int:
    """Return the limit of the long side: COCO's 1333 is 5/3 of its 800."""
    return round(short * 5 / 3)


class DetectTraining(Training[DetectionBatch]):
    """Data and model of a detection run."""

    model: Detector

    def __init__(
        self,
        task: Detect,
        model: Detector,
        *,
        detector: str,
        model_args: Mapping[str, Any],
        train_set: DetectionDataset,
        val_set: DetectionDataset,
        sizing: Sizing,
    ) -> None:
        super().__init__(task, model, train_set=train_set, val_set=val_set, preprocess=to_input)
        self.sizing = sizing
        self._description = task.describe(detector, classes=self.classes, model_args=model_args)

    def train_loader(self, loading: Loading) -> Loader[DetectionBatch]:
        return create_detection_loader(self.train_set, sizing=self.sizing, **vars(loading))

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


register_task(Detect())
