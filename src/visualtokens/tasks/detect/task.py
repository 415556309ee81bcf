"""Detection as a task: models, data, loss and prediction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2 import functional

from visualtokens.data import Loader, Split, open_detection
from visualtokens.data.annotations import masks_library
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
from visualtokens.tasks.initialize import initialize_dense, read_initial
from visualtokens.tasks.options import CLASSIFICATION_ONLY, TaskOptions
from visualtokens.tasks.schema import check_input
from visualtokens.tasks.task import (
    Checkpoint,
    Loading,
    Loss,
    Task,
    Training,
    normalised_black,
    register_task,
)

if TYPE_CHECKING:
    from visualtokens.explain import Subject

BODY = "backbone.body.body."  # what the names of the backbone's weights start with
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
    explain_options = ("object",)
    pictures = ("objects",)
    eval_batch = 4

    def open(self, options: TaskOptions) -> DetectTraining:
        if options.model not in DETECTORS:
            raise unknown("detector", options.model, DETECTORS)
        masks_library()  # is needed for the evaluation, after the first epoch
        masks = DETECTORS[options.model].has_masks
        train_set = _open_data(options.data, "train", masks, options.data_options)
        val_set = _open_data(options.data, "val", masks, options.data_options)
        initial = read_initial(options, model=options.backbone)
        model_args = initial.add_to_backbone(_model_args(options))
        model = build(options.model, classes=len(train_set.classes), model_args=model_args)
        notes = initialize_dense(
            model,
            initial,
            task=self.name,
            classes=train_set.classes,
            backbone=model.backbone.body,
            body=BODY,
            heads=HEADS,
        )
        _set_statistics(model, initial.statistics)
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
            notes=notes,
        )

    def check(self, config: Mapping[str, Any]) -> None:
        super().check(config)
        check_input(config.get("preprocess", {}), "preprocess", size="size", dims=2)

    def build(self, config: Mapping[str, Any]) -> tuple[Detector, list[str], Any]:
        detector, classes, model_args = self.described(config)
        model = build(detector, classes=len(classes), model_args=model_args)
        _set_statistics(model, config.get("preprocess", {}))  # older checkpoints have none
        return model, classes, to_input

    def export_module(self, checkpoint: Checkpoint) -> nn.Module:
        raise UserError(
            f"a {checkpoint.config['architecture']} cannot be exported: torch captures no program where the "
            "number of boxes depends on the image; use the checkpoint itself: vtok predict --checkpoint"
        )

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
        masks_library()  # is needed for the evaluation
        return _open_data(data, split, bool(checkpoint.model.has_masks), options)

    def loader(self, dataset: DetectionDataset, preprocess: Any, loading: Loading) -> Loader[DetectionBatch]:
        return create_detection_loader(dataset, sizing=None, **vars(loading))

    def evaluate(
        self, checkpoint: Checkpoint, batches: Iterable[DetectionBatch], *, progress: bool | None = None
    ) -> Evaluation:
        return evaluate(checkpoint.model, batches, classes=len(checkpoint.classes), progress=progress)

    def predict(self, checkpoint: Checkpoint, image: Image.Image, *, score: float = SCORE) -> ImageDetections:
        return ImageDetections(predict(checkpoint.model, image, score=score), checkpoint.classes)

    def image_module(self, checkpoint: Checkpoint) -> tuple[nn.Module, Tensor]:
        model: Any = checkpoint.model
        return model.backbone, normalised_black(model.transform.image_mean, model.transform.image_std)

    def subject(
        self,
        checkpoint: Checkpoint,
        image: Image.Image,
        *,
        target: int | None = None,
        against: int | None = None,
        object: int = 1,
    ) -> Subject:
        from visualtokens.tasks.detect.subject import object_subject

        return object_subject(checkpoint, image, target=target, against=against, number=object)

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


def _set_statistics(model: Detector, statistics: Mapping[str, Any]) -> None:
    """Set the ``mean`` and ``std`` of the input that the model normalises, where they are given."""
    transform: Any = model.transform
    transform.image_mean = list(statistics.get("mean", transform.image_mean))
    transform.image_std = list(statistics.get("std", transform.image_std))


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
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__(task, model, train_set=train_set, val_set=val_set, preprocess=to_input)
        self.sizing, self.notes = sizing, notes
        transform: Any = model.transform
        self._description = task.describe(detector, classes=self.classes, model_args=model_args) | {
            "preprocess": {"mean": list(transform.image_mean), "std": list(transform.image_std)}
        }

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

    def heads(self) -> set[str]:
        return {name for name, _ in self.model.named_parameters() if not name.startswith(BODY)}


register_task(Detect())
