"""One label per image: the loss to train with, and the evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import timm
import torch
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import visualtokens.models as _registers_our_models  # noqa: F401
from visualtokens.data import Augment, BadImage, Batch, ImageDataset, Loader, Mix, Preprocess, create_loader
from visualtokens.errors import UserError, unknown
from visualtokens.tasks.task import Loading, Loss, Task, eval_mode, of_all_processes


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


# Learning from the answers of another model.


class Teacher(nn.Module):
    """A model that answers for images that were prepared for another one."""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, *, own: Preprocess, given: Preprocess) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.size = own.size
        # (x · given.std + given.mean − own.mean) / own.std, in one step
        scale = torch.tensor(given.std) / torch.tensor(own.std)
        shift = (torch.tensor(given.mean) - torch.tensor(own.mean)) / torch.tensor(own.std)
        self.register_buffer("scale", scale.view(1, 3, 1, 1), persistent=False)
        self.register_buffer("shift", shift.view(1, 3, 1, 1), persistent=False)

    def train(self, mode: bool = True) -> Teacher:
        """Stays in evaluation mode."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(B, classes)`` for ``images (B, 3, H, W)``, resized to what the teacher was trained on."""
        images = images * self.scale + self.shift
        if images.shape[2:] != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        return self.model(images)


def distillation(logits: Tensor, teacher: Tensor, *, temperature: float) -> Tensor:
    """T² · KL(softmax(teacher / T) ‖ softmax(logits / T)), mean over the images, in float32.

    T² keeps the size of the gradient whatever the temperature T.
    """
    ours = F.log_softmax(logits.float() / temperature, dim=1)
    theirs = F.log_softmax(teacher.float() / temperature, dim=1)
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * temperature**2


# Classifiers of timm's registry: making one, its preprocessing, and describing it for a checkpoint.

# Arguments of timm.create_model that fetch or unpickle files: nothing a checkpoint's config may ask for.
_RESERVED = ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
_PREPROCESSING = ("input_size", "mean", "std", "crop_pct", "interpolation")
FIRST_WEIGHTS = "init_from"  # reads another file: nothing that a checkpoint may ask for
# Of timm's pretrained_cfg; the rest tells of somebody else's weights: where they are, their labels, licence.
_DESCRIBES_MODEL = ("interpolation", "pool_size", "first_conv", "classifier", "fixed_input_size")


def build_model(
    name: str, *, classes: int, model_args: Mapping[str, Any], cfg: Mapping[str, Any] | None = None
) -> nn.Module:
    """A model of timm's registry, which holds ours, with fresh weights.

    ``cfg`` overrides what the model's configuration says about preprocessing; the rest of it is ignored.
    """
    if not timm.is_model(name):
        raise unknown("model", name, timm.list_models())
    for reserved in _RESERVED:
        if reserved in model_args:
            raise UserError(f"model_args may not hold {reserved!r}; leave it out")
    if "num_classes" in model_args:
        raise UserError("model_args may not hold 'num_classes'; the data decides it")
    overlay = {key: value for key, value in (cfg or {}).items() if key in _PREPROCESSING}
    try:
        return timm.create_model(name, num_classes=classes, pretrained_cfg_overlay=overlay, **model_args)
    except TypeError as error:  # an argument that the model does not have
        raise UserError(f"model {name!r} refuses model_args={dict(model_args)}: {error}") from error


def sized_args(name: str, model_args: Mapping[str, Any], *, size: int | None) -> dict[str, Any]:
    """``model_args``, with the image size for those models of timm that are built for one size only."""
    cfg = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    fixed = cfg is not None and cfg.fixed_input_size
    return {**model_args, "img_size": size} if size and fixed else dict(model_args)


def preprocess_for(model: nn.Module, *, size: int | None = None) -> Preprocess:
    """What the model expects of an image, by its timm configuration; ``size`` overrides the input size."""
    cfg = timm_cfg(model)
    height, width = (size, size) if size else cfg["input_size"][-2:]
    return Preprocess((height, width), tuple(cfg["mean"]), tuple(cfg["std"]), crop=cfg["crop_pct"] or 1.0)


def timm_cfg(model: nn.Module) -> dict[str, Any]:
    """What timm knows about a model besides its weights."""
    return cast(dict[str, Any], model.pretrained_cfg)


def describe_classifier(
    model: nn.Module, *, classes: Sequence[str], preprocess: Preprocess, model_args: Mapping[str, Any]
) -> dict[str, Any]:
    """What the Hub's ``config.json`` says about a model that was built with ``model_args``.

    Where its first weights came from (``init_from``) is no part of the model.
    """
    cfg = timm_cfg(model)
    kept = {name: cfg[name] for name in _DESCRIBES_MODEL if name in cfg}
    seen = {
        "input_size": (3, *preprocess.size),
        "mean": preprocess.mean,
        "std": preprocess.std,
        "crop_pct": preprocess.crop,
    }
    return {
        "architecture": cfg["architecture"],
        "num_classes": len(classes),
        "num_features": model.num_features,
        "label_names": list(classes),
        "model_args": {name: value for name, value in model_args.items() if name != FIRST_WEIGHTS},
        "pretrained_cfg": kept | seen | {"num_classes": len(classes)},
    }
