"""One label per image: the loss to train with, and the evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from visualtokens.data import Augment, BadImage, Batch, ImageDataset, Loader, Mix, Preprocess, create_loader
from visualtokens.errors import UserError
from visualtokens.tasks.build import describe_classifier
from visualtokens.tasks.distill import Teacher, distillation
from visualtokens.tasks.judging import eval_mode, of_all_processes
from visualtokens.tasks.task import Loading, Loss, Task


@dataclass(frozen=True)
class Evaluation:
    """How well a model labels the images that could be read."""

    accuracy: float  # share of the images that were read
    loss: float  # mean cross-entropy, without label smoothing
    confusion: Tensor  # (classes, classes) counts: rows are the truth, columns what the model said
    images: int  # how many were read and judged
    unreadable: tuple[BadImage, ...]  # the others, by path and reason; of several processes, this one's

    @property
    def metrics(self) -> dict[str, float]:
        return {"loss": self.loss, "accuracy": self.accuracy}


@dataclass(frozen=True, kw_only=True)
class ClassifyLoss:
    """What the loss is made of: (1 − ``distill``) · cross-entropy + ``distill`` · distillation."""

    smoothing: float = 0.0  # how much of each label is spread over the other classes
    mixup: float = 0.0
    cutmix: float = 0.0
    distill: float = 0.0
    temperature: float = 1.0


class Classify(Task[Batch, Evaluation]):
    """Train a classifier of whole images."""

    name = "classify"
    score = "accuracy"

    def __init__(
        self,
        model: nn.Module,
        *,
        train_set: ImageDataset,
        val_set: ImageDataset,
        preprocess: Preprocess,
        model_args: Mapping[str, Any],
        augment: Augment,
        loss: ClassifyLoss,
        teacher: Teacher | None = None,
    ) -> None:
        self.classes = train_set.classes
        if len(self.classes) < 2:
            raise UserError(f"{train_set.spec} has {len(self.classes)} class; a classifier needs 2 or more")
        self.model = model
        self.images = (len(train_set), len(val_set))
        self.train_set, self.val_set = train_set, val_set
        self.preprocess, self.augment = preprocess, augment
        self.options, self.teacher = loss, teacher
        self.mix: Mix | None = None
        if loss.mixup or loss.cutmix:
            self.mix = Mix(
                mixup=loss.mixup, cutmix=loss.cutmix, smoothing=loss.smoothing, classes=len(self.classes)
            )
        # Now, because what the model was built from does not change while it is trained.
        self._description = describe_classifier(
            model, classes=self.classes, preprocess=preprocess, model_args=model_args
        )

    def train_loader(self, loading: Loading) -> Loader[Batch]:
        return self._loader(self.train_set, self.augment, loading)

    def val_loader(self, loading: Loading) -> Loader[Batch]:
        return self._loader(self.val_set, None, loading)

    def _loader(self, dataset: ImageDataset, augment: Augment | None, loading: Loading) -> Loader[Batch]:
        return create_loader(
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

    def loss(self, model: nn.Module, batch: Batch, *, rng: np.random.Generator) -> Loss:
        images, targets, labels = batch.images, batch.labels, batch.labels
        if self.mix is not None:
            images, targets = self.mix(images, labels, rng)
            labels = targets.argmax(1)  # of the image that is more visible
        logits = model(images)  # (B, classes)
        value = loss_of(logits, targets, smoothing=0.0 if self.mix else self.options.smoothing)
        if self.teacher is not None:
            taught = distillation(logits, self.teacher(images), temperature=self.options.temperature)
            value = (1 - self.options.distill) * value + self.options.distill * taught
        return Loss(value, {"accuracy": (logits.argmax(1) == labels).sum()})

    def evaluate(self, model: nn.Module, batches: Iterable[Batch], *, progress: bool | None) -> Evaluation:
        return evaluate(model, batches, classes=len(self.classes), progress=progress)

    def describe(self) -> dict[str, Any]:
        return self._description

    def to(self, device: torch.device) -> None:
        if self.teacher is not None:
            self.teacher.to(device)


def loss_of(logits: Tensor, targets: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy of ``logits (B, classes)``, computed in float32.

    ``targets`` are labels ``(B,)``, or shares of every class ``(B, classes)``, which are smooth already.
    """
    if targets.ndim == 2:
        return SoftTargetCrossEntropy()(logits.float(), targets)
    return F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)


def evaluate(
    model: nn.Module, loader: Iterable[Batch], *, classes: int, progress: bool | None = None
) -> Evaluation:
    """Judge the model on every image of the loader, on the device the model is on.

    Images that cannot be read count for nothing and are returned. ``progress`` shows a bar; None shows it
    on a terminal only. The model comes back in the mode it was in. Where several processes run, each gives
    its share of the images, and every one gets the figures of all.
    """
    # Here, because torchmetrics takes seconds to import and only evaluation needs it.
    from torchmetrics.classification import MulticlassConfusionMatrix

    device = next(model.parameters()).device
    confusion = MulticlassConfusionMatrix(classes, sync_on_compute=False).to(device)
    unreadable: list[BadImage] = []
    loss_sum = 0.0
    with eval_mode(model), torch.inference_mode():
        for batch in tqdm(
            loader, desc="evaluate", leave=False, disable=None if progress is None else not progress
        ):
            unreadable.extend(batch.bad)
            if len(batch) == 0:
                continue
            labels = batch.labels.to(device)
            logits = model(batch.images.to(device))  # (B, classes)
            confusion.update(logits, labels)
            loss_sum += loss_of(logits, labels).item() * len(labels)
    counts = of_all_processes(confusion.confmat.cpu().clone())  # (classes, classes)
    images = int(counts.sum())
    if images == 0:
        raise UserError(f"nothing to evaluate: none of the {len(unreadable)} images could be read")
    return Evaluation(
        accuracy=int(counts.diagonal().sum()) / images,
        loss=of_all_processes(torch.tensor(loss_sum, dtype=torch.float64)).item() / images,
        confusion=counts,
        images=images,
        unreadable=tuple(unreadable),
    )
