"""The loss of a segmentation model, and its evaluation at the full size of every image."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.data import BadImage
from visualtokens.data.segmentation import IGNORE, SegmentBatch, mirrored_classes
from visualtokens.errors import UserError, unknown
from visualtokens.modes import eval_mode
from visualtokens.progress import count, track
from visualtokens.tables import table
from visualtokens.tasks.evaluation import sum_over_processes
from visualtokens.tasks.segment.inference import Inference, probabilities

TINY = torch.finfo(torch.float32).tiny
SHOWN = 30  # classes in the table of an evaluation


@dataclass(frozen=True, kw_only=True)
class SegmentLoss:
    """Options of the loss: cross-entropy + ``auxiliary`` · cross-entropy of the auxiliary head."""

    smoothing: float = 0.0  # share of each label that is spread over the other classes
    auxiliary: float = 0.4
    class_weights: Mapping[str, float] = field(default_factory=dict)  # 1 for classes that are not named

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise UserError(f"smoothing={self.smoothing} must be at least 0 and less than 1")
        if self.auxiliary < 0:
            raise UserError(f"auxiliary={self.auxiliary} must be at least 0")
        for name, weight in self.class_weights.items():
            if weight < 0:
                raise UserError(f"class_weights: {weight} of {name!r} must be at least 0")

    def weights(self, classes: Sequence[str]) -> Tensor | None:
        """Return the weight of every class ``(classes,)``; None if all are 1."""
        for name in self.class_weights:
            if name not in classes:
                raise unknown("class in class_weights", name, classes)
        if not self.class_weights:
            return None
        return torch.tensor([float(self.class_weights.get(name, 1.0)) for name in classes])


def loss_of(
    logits: Tensor, masks: Tensor, *, weights: Tensor | None = None, smoothing: float = 0.0
) -> Tensor:
    """Return the mean cross-entropy of ``logits (B, classes, H, W)`` over ``masks (B, H, W)``, in float32.

    Pixels of class 255 are left out. With ``weights (classes,)`` it is the weighted mean. Without any
    labelled pixel it is 0.
    """
    targets = masks.long()
    total = F.cross_entropy(
        logits.float(),
        targets,
        weight=weights,
        ignore_index=IGNORE,
        label_smoothing=smoothing,
        reduction="sum",
    )
    labelled = targets != IGNORE
    if weights is None:
        count = labelled.sum().float()
    else:
        count = weights[torch.where(labelled, targets, 0)].masked_fill(~labelled, 0).sum()
    return total / count.clamp_min(TINY)


@dataclass(frozen=True)
class SegmentEvaluation:
    """Metrics over all pixels of the readable images, from one confusion matrix.

    A class that is neither in the masks nor predicted has no metrics and does not count in the means. A
    class that is only predicted has an IoU of 0, which does count.
    """

    confusion: Tensor  # (classes, classes) counts of pixels: rows are the masks, columns the predictions
    loss: float  # mean cross-entropy per pixel, without label smoothing
    images: int  # evaluated
    unreadable: tuple[BadImage, ...]  # with several processes, those of this one

    @property
    def iou(self) -> list[float | None]:
        """Intersection over union per class."""
        correct, labelled, predicted = self._counts()
        return _ratios(correct, labelled + predicted - correct)

    @property
    def class_accuracy(self) -> list[float | None]:
        """Recall per class."""
        correct, labelled, _ = self._counts()
        return _ratios(correct, labelled)

    @property
    def miou(self) -> float:
        """Mean IoU over the classes."""
        return _mean(self.iou)

    @property
    def pixel_accuracy(self) -> float:
        """Share of all pixels that are correct."""
        correct, labelled, _ = self._counts()
        return (correct.sum() / labelled.sum()).item()

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "loss": self.loss,
            "miou": self.miou,
            "pixel_accuracy": self.pixel_accuracy,
            "class_accuracy": _mean(self.class_accuracy),
        }

    def _counts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the correct, labelled and predicted pixels per class ``(classes,)``."""
        counts = self.confusion.double()
        return counts.diagonal(), counts.sum(1), counts.sum(0)

    def to_dict(self, classes: Sequence[str]) -> dict[str, Any]:
        return {
            **self.metrics,
            "images": self.images,
            "classes": list(classes),
            "iou": self.iou,
            "class_accuracy_by_class": self.class_accuracy,
            "confusion": self.confusion.tolist(),
        }

    def text(self, classes: Sequence[str]) -> str:
        head = (
            f"mIoU {self.miou:.1%}, pixel accuracy {self.pixel_accuracy:.1%}, loss {self.loss:.3f} "
            f"({self.images} images)"
        )
        present = [(value, i) for i, value in enumerate(self.iou) if value is not None]
        pixels = self.confusion.sum(1) / self.confusion.sum()  # (classes,)
        rows = [(classes[i], f"{pixels[i].item():.1%}", f"{iou:.1%}") for iou, i in sorted(present)[:SHOWN]]
        more = len(present) - len(rows)
        foot = f"\n… and {more} classes that do better; --json has all" if more else ""
        return f"{head}\n\n" + table(rows, header=("class", "pixels", "IoU"), right=(1, 2)) + foot


def _ratios(parts: Tensor, wholes: Tensor) -> list[float | None]:
    return [p / w if w else None for p, w in zip(parts.tolist(), wholes.tolist(), strict=True)]


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known)


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    loader: Iterable[SegmentBatch],
    *,
    classes: Sequence[str],
    inference: Inference | None = None,
    progress: bool | None = None,
) -> SegmentEvaluation:
    """Evaluate the model on every image of the loader, on the device of the model.

    The metrics of an image do not depend on its batch. Unreadable images are not counted but returned.
    ``progress`` shows a bar; None shows it on a terminal and logs the progress elsewhere. Every process
    passes its share of the images and gets the metrics of all.
    """
    sums = _Sums(model, classes, inference or Inference())
    unreadable: list[BadImage] = []
    with eval_mode(model):
        for batch in track(loader, "evaluate", shown=progress):
            unreadable.extend(batch.bad)
            sums.add(batch)
    counts, loss, images = sums.over_processes()
    if images == 0:
        raise UserError(f"nothing to evaluate: {count(len(unreadable), 'image')} could not be read")
    pixels = int(counts.sum())
    if pixels == 0:
        raise UserError(f"nothing to evaluate: no pixel of {count(images, 'mask')} has a class")
    return SegmentEvaluation(counts, loss / pixels, images, tuple(unreadable))


class _Sums:
    """Confusion matrix, summed loss and number of images of the batches so far."""

    def __init__(self, model: nn.Module, classes: Sequence[str], inference: Inference) -> None:
        # torchmetrics takes seconds to import, and only evaluation needs it.
        from torchmetrics.classification import MulticlassConfusionMatrix

        self.model = model
        self.inference = inference
        self.mirror = mirrored_classes(classes)
        self.device = next(model.parameters()).device
        self.confusion = MulticlassConfusionMatrix(
            len(classes), ignore_index=IGNORE, validate_args=False, sync_on_compute=False
        ).to(self.device)
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.images = 0

    def add(self, batch: SegmentBatch) -> None:
        """Add a batch; images of one size run through the model together."""
        by_size: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for image, mask in batch:
            by_size[tuple(image.shape)].append((image, mask))
        for pairs in by_size.values():
            images = torch.stack([image for image, _ in pairs]).to(self.device)
            views = self.inference(self.model, images, mirror=self.mirror)
            for i, (_, mask) in enumerate(pairs):
                self._add_image([view[i] for view in views], mask.to(self.device).long())
        self.images += len(batch)

    def _add_image(self, views: list[Tensor], mask: Tensor) -> None:
        for rows, p in probabilities(views, (mask.shape[0], mask.shape[1])):
            labels = mask[rows]  # (rows, W)
            self.confusion.update(p.max(2).indices.flatten(), labels.flatten())
            labelled = labels != IGNORE
            of_label = p.gather(2, torch.where(labelled, labels, 0)[..., None])[..., 0]  # (rows, W)
            self.loss -= of_label[labelled].clamp_min(TINY).log().double().sum()

    def over_processes(self) -> tuple[Tensor, float, int]:
        """Return counts of pixels ``(classes, classes)``, the sum of their losses, the number of images."""
        counts = sum_over_processes(self.confusion.confmat.cpu().clone())
        sums = sum_over_processes(torch.tensor([self.loss.item(), self.images], dtype=torch.float64))
        return counts, sums[0].item(), int(sums[1])
