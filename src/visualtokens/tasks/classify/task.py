"""Classification as a task: models, data, the training loss with labels and a teacher."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.data import (
    PRESETS,
    Augment,
    Batch,
    ImageDataset,
    Loader,
    Mix,
    Preprocess,
    Split,
    create_loader,
    open_dataset,
)
from visualtokens.data.base import with_classes
from visualtokens.errors import UserError, unknown
from visualtokens.tasks.classify.evaluation import (
    ClassifyEvaluation,
    evaluate,
    loss_of,
    predict,
    predict_batch,
)
from visualtokens.tasks.hub import pretrained_model
from visualtokens.tasks.initialize import initialize_classifier, read_initial
from visualtokens.tasks.options import TaskOptions
from visualtokens.tasks.prediction import TOP, Classification, top_columns
from visualtokens.tasks.schema import LABELS, check_input
from visualtokens.tasks.task import (
    DEFAULT_TASK,
    Checkpoint,
    Loading,
    Loss,
    Task,
    Training,
    register_task,
)
from visualtokens.tasks.timm_models import (
    build_model,
    class_names,
    head_prefixes,
    other_class_names,
    preprocess_for,
    sized_args,
    timm_cfg,
)

if TYPE_CHECKING:
    from visualtokens.explain import Subject
    from visualtokens.explain.inputs import Unit

REDUCED = "reduced_vit"  # the registered name of a vision transformer with fewer tokens
# The entries of timm's pretrained_cfg that describe the model rather than its pretrained weights.
_DESCRIBES_MODEL = ("pool_size", "first_conv", "classifier", "fixed_input_size")


class Classify(Task):
    """One label per image."""

    name = "classify"
    score = "accuracy"
    unused = ("loss_args",)
    predict_options = ("top",)
    explain_options = ("unit",)
    predicts_batches = True

    def open(self, options: TaskOptions) -> ClassifyTraining:
        train_set = open_dataset(options.data, "train", **options.data_options)
        val_set = open_dataset(options.data, "val", **options.data_options)
        classes = train_set.classes
        initial = read_initial(options, model=options.model)
        model_args = initial.model_args | all_model_args(options)
        model = build_model(options.model, classes=len(classes), model_args=model_args, cfg=initial.cfg)
        preprocess = preprocess_for(model, size=options.size)
        notes = initialize_classifier(
            model,
            initial,
            name=options.model,
            classes=classes,
            model_args=model_args,
            tasks=(self.name, DEFAULT_TASK),
        )
        distill = 0.0
        if options.teacher is not None:
            distill = 0.5 if options.distill is None else options.distill
        return ClassifyTraining(
            self,
            model,
            train_set=train_set,
            val_set=val_set,
            preprocess=preprocess,
            model_args=model_args,
            notes=notes,
            augment=augment_of(options),
            repeats=options.repeats,
            loss=ClassifyLoss(
                smoothing=options.label_smoothing,
                mixup=options.mixup,
                cutmix=options.cutmix,
                distill=distill,
                temperature=options.distill_temperature or 1.0,
            ),
            teacher=None if options.teacher is None else self._teacher(options.teacher, classes, preprocess),
        )

    def _teacher(self, name: str, classes: Sequence[str], student: Preprocess) -> Teacher:
        """Return the teacher from a checkpoint folder, or a timm model with pretrained weights."""
        model: nn.Module
        if Path(name).exists():
            try:
                checkpoint = self.load(name)
            except UserError as error:
                raise UserError(f"teacher: {error}") from error
            model, own, count = checkpoint.model, checkpoint.preprocess, len(checkpoint.classes)
            if checkpoint.classes != list(classes):
                raise UserError(f"teacher {name!r} was trained for other classes than those of the data")
        elif timm.is_model(name):
            origin = f"teacher: the weights of {name!r}"
            model = pretrained_model(name, origin=origin, instead="--teacher FOLDER")
            own, count = preprocess_for(model), int(model.num_classes)  # type: ignore[arg-type]
        else:
            raise unknown("teacher", name, timm.list_models(pretrained=True))
        if count != len(classes):
            raise UserError(f"teacher {name!r} has {count} classes, the data have {len(classes)}")
        return Teacher(model, own=own, given=student)

    def check(self, config: Mapping[str, Any]) -> None:
        super().check(config)
        check_input(config.get("pretrained_cfg", {}), "pretrained_cfg", size="input_size", dims=3)

    def build(self, config: Mapping[str, Any]) -> tuple[nn.Module, list[str], Preprocess]:
        architecture, classes, model_args = self.described(config)
        cfg = config.get("pretrained_cfg", {})
        model = build_model(architecture, classes=len(classes), model_args=model_args, cfg=cfg)
        return model, classes if LABELS in config else class_names(model), preprocess_for(model)

    def open_data(self, checkpoint: Checkpoint, data: str, split: Split, /, **options: Any) -> ImageDataset:
        # a converted checkpoint does not name its classes
        others = [] if LABELS in checkpoint.config else other_class_names(checkpoint.model)
        return with_classes(open_dataset(data, split, **options), checkpoint.classes, *others)

    def loader(self, dataset: ImageDataset, preprocess: Preprocess, loading: Loading) -> Loader[Batch]:
        return create_loader(dataset, preprocess, train=False, **vars(loading))

    def evaluate(
        self, checkpoint: Checkpoint, batches: Iterable[Batch], *, progress: bool | None = None
    ) -> ClassifyEvaluation:
        return evaluate(checkpoint.model, batches, classes=len(checkpoint.classes), progress=progress)

    def predict(self, checkpoint: Checkpoint, image: Image.Image, *, top: int = TOP) -> Classification:
        return predict(
            checkpoint.model, image, preprocess=checkpoint.preprocess, classes=checkpoint.classes, top=top
        )

    def prepare(self, checkpoint: Checkpoint, image: Image.Image) -> Tensor:
        return checkpoint.preprocess(image)

    def predict_batch(
        self, checkpoint: Checkpoint, prepared: Sequence[Tensor], *, top: int = TOP
    ) -> list[Classification]:
        return predict_batch(checkpoint.model, prepared, classes=checkpoint.classes, top=top)

    def columns(self, checkpoint: Checkpoint, *, top: int = TOP) -> dict[str, type]:
        return top_columns(top, len(checkpoint.classes))

    def subject(
        self,
        checkpoint: Checkpoint,
        image: Image.Image,
        *,
        target: int | None = None,
        against: int | None = None,
        unit: Unit = "probability",
    ) -> Subject:
        from visualtokens.explain.subject import class_subject

        return class_subject(
            checkpoint.model,
            image,
            preprocess=checkpoint.preprocess,
            target=target,
            against=against,
            unit=unit,
            classes=checkpoint.classes,
        )

    def classifier(self, checkpoint: Checkpoint) -> nn.Module:
        return checkpoint.model

    def describe_model(
        self,
        model: nn.Module,
        *,
        classes: Sequence[str],
        preprocess: Preprocess,
        model_args: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the ``config.json`` of a classifier, in timm's layout.

        A model that ``visualtokens.reduce`` has reduced is described as a ``reduced_vit``.
        """
        cfg = timm_cfg(model)
        architecture, reduction = cfg["architecture"], vars(model).get("reduction")
        if reduction is not None and architecture != REDUCED:
            model_args = {**model_args, "base": architecture, **reduction.model_args()}
            architecture = REDUCED
        kept = {name: cfg[name] for name in _DESCRIBES_MODEL if name in cfg}
        own = {
            "input_size": (3, *preprocess.size),
            "mean": preprocess.mean,
            "std": preprocess.std,
            "crop_pct": preprocess.crop,
            "interpolation": preprocess.interpolation,
        }
        return self.describe(architecture, classes=classes, model_args=model_args) | {
            "num_features": model.num_features,
            "pretrained_cfg": kept | own | {"num_classes": len(classes)},
        }


def all_model_args(options: TaskOptions) -> dict[str, Any]:
    """Return ``model_args`` with the image size and the stochastic depth that other options set."""
    arguments = sized_args(options.model, options.model_args, size=options.size)
    if options.drop_path is None:
        return arguments
    return arguments | {"drop_path_rate": options.drop_path_rate(options.model)}


def augment_of(options: TaskOptions) -> Augment:
    """Return the augmentation: the preset, with the policy and random erasing that other options add."""
    preset = options.augment or ("digits" if options.shows_digits else "photo")
    if preset not in PRESETS:
        raise unknown("augmentation", preset, PRESETS)
    return dataclasses.replace(PRESETS[preset], policy=options.auto_augment, erase=options.random_erasing)


# Training.


@dataclass(frozen=True, kw_only=True)
class ClassifyLoss:
    """Options of the loss (1 − ``distill``) · cross-entropy + ``distill`` · distillation."""

    smoothing: float = 0.0  # share of each label that is spread over the other classes
    mixup: float = 0.0
    cutmix: float = 0.0
    distill: float = 0.0
    temperature: float = 1.0


class ClassifyTraining(Training[Batch]):
    """Data, model and loss of a classification run."""

    def __init__(
        self,
        task: Classify,
        model: nn.Module,
        *,
        train_set: ImageDataset,
        val_set: ImageDataset,
        preprocess: Preprocess,
        model_args: Mapping[str, Any],
        augment: Augment,
        loss: ClassifyLoss,
        repeats: int = 1,
        teacher: Teacher | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__(task, model, train_set=train_set, val_set=val_set, preprocess=preprocess)
        if len(self.classes) < 2:
            raise UserError(f"{train_set.spec} has {len(self.classes)} class; a classifier needs 2 or more")
        self.augment, self.options, self.teacher, self.notes = augment, loss, teacher, notes
        self.repeats = repeats
        self.mix: Mix | None = None
        if loss.mixup or loss.cutmix:
            self.mix = Mix(
                mixup=loss.mixup, cutmix=loss.cutmix, smoothing=loss.smoothing, classes=len(self.classes)
            )
        self._description = task.describe_model(
            model, classes=self.classes, preprocess=preprocess, model_args=model_args
        )

    def train_loader(self, loading: Loading) -> Loader[Batch]:
        return create_loader(
            self.train_set,
            self.preprocess,
            train=True,
            augment=self.augment,
            repeats=self.repeats,
            **vars(loading),
        )

    def loss(self, model: nn.Module, batch: Batch, *, rng: np.random.Generator) -> Loss:
        images, targets, labels = batch.images, batch.labels, batch.labels
        if self.mix is not None:
            images, targets = self.mix(images, labels, rng)
            labels = targets.argmax(1)  # the label of the image with the larger share
        logits = model(images)  # (B, classes)
        value = loss_of(logits, targets, smoothing=0.0 if self.mix else self.options.smoothing)
        if self.teacher is not None:
            distilled = distillation(logits, self.teacher(images), temperature=self.options.temperature)
            value = (1 - self.options.distill) * value + self.options.distill * distilled
        return Loss(value, {"accuracy": (logits.argmax(1) == labels).sum()})

    def evaluate(
        self, model: nn.Module, batches: Iterable[Batch], *, progress: bool | None
    ) -> ClassifyEvaluation:
        return evaluate(model, batches, classes=len(self.classes), progress=progress)

    def describe(self) -> dict[str, Any]:
        return self._description

    def heads(self) -> set[str]:
        prefixes = head_prefixes(self.model)
        return {name for name, _ in self.model.named_parameters() if name.startswith(prefixes)}

    def to(self, device: torch.device) -> None:
        if self.teacher is not None:
            self.teacher.to(device)


def distillation(logits: Tensor, teacher: Tensor, *, temperature: float) -> Tensor:
    """Return T² · KL(softmax(teacher / T) ‖ softmax(logits / T)), mean over the images, in float32.

    Both are ``(B, classes)``. T² keeps the scale of the gradient independent of the temperature T.
    """
    ours = F.log_softmax(logits.float() / temperature, dim=1)
    theirs = F.log_softmax(teacher.float() / temperature, dim=1)
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * temperature**2


class Teacher(nn.Module):
    """A frozen classifier that takes images preprocessed for another model."""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, *, own: Preprocess, given: Preprocess) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.size = own.size
        # (x · given.std + given.mean − own.mean) / own.std = x · scale + shift
        scale = torch.tensor(given.std) / torch.tensor(own.std)
        shift = (torch.tensor(given.mean) - torch.tensor(own.mean)) / torch.tensor(own.std)
        self.register_buffer("scale", scale.view(1, 3, 1, 1), persistent=False)
        self.register_buffer("shift", shift.view(1, 3, 1, 1), persistent=False)

    def train(self, mode: bool = True) -> Teacher:
        """Stay in eval mode."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``(B, classes)`` of ``images (B, 3, H, W)``, resized to the teacher's input size."""
        images = images * self.scale + self.shift
        if images.shape[2:] != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        return self.model(images)


register_task(Classify())
