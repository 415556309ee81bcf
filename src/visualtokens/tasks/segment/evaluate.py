"""Judging a segmentation model at the full size of every image."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from visualtokens.data import BadImage
from visualtokens.data.segmentation import mirrored_classes
from visualtokens.data.segmentation_loader import SegmentBatch
from visualtokens.data.segmentation_transforms import IGNORE
from visualtokens.errors import UserError, unknown
from visualtokens.tasks.segment.inference import Inference, probabilities
from visualtokens.tasks.task import eval_mode, of_all_processes

TINY = torch.finfo(torch.float32).tiny


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    loader: Iterable[SegmentBatch],
    *,
    classes: Sequence[str],
    inference: Inference | None = None,
    progress: bool | None = None,
) -> SegmentEvaluation:
    """Judge the model on every image of the loader, on the device the model is on.

    Each image is judged as it would be alone: nothing depends on the batch. Images that cannot be read
    count for nothing and are returned. ``progress`` shows a bar; None shows it on a terminal only. The
    model comes back in the mode it was in. Where several processes run, each gives its share of the images,
    and every one gets the figures of all.
    """
    score = _Score(model, classes, inference or Inference())
    unreadable: list[BadImage] = []
    hidden = None if progress is None else not progress
    with eval_mode(model):
        for batch in tqdm(loader, desc="evaluate", leave=False, disable=hidden):
            unreadable.extend(batch.bad)
            score.add(batch)
    counts, loss, images = score.of_all_processes()
    if images == 0:
        raise UserError(f"nothing to evaluate: none of the {len(unreadable)} images could be read")
    pixels = int(counts.sum())
    if pixels == 0:
        raise UserError(f"nothing to evaluate: no pixel of the {images} masks has a class")
    return SegmentEvaluation(counts, loss / pixels, images, tuple(unreadable))


class _Score:
    """The sums so far."""

    def __init__(self, model: nn.Module, classes: Sequence[str], inference: Inference) -> None:
        # Here, because torchmetrics takes seconds to import and only evaluation needs it.
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
        """Images of one size are looked at together."""
        alike: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for image, mask in batch:
            alike[tuple(image.shape)].append((image, mask))
        for pairs in alike.values():
            images = torch.stack([image for image, _ in pairs]).to(self.device)
            looks = self.inference(self.model, images, mirror=self.mirror)
            for i, (_, mask) in enumerate(pairs):
                self._judge([look[i] for look in looks], mask.to(self.device).long())
        self.images += len(batch)

    def _judge(self, looks: list[Tensor], truth: Tensor) -> None:
        for rows, share in probabilities(looks, (truth.shape[0], truth.shape[1])):
            part = truth[rows]  # (rows, W)
            self.confusion.update(share.max(2).indices.flatten(), part.flatten())
            asked = part != IGNORE
            right = share.gather(2, torch.where(asked, part, 0)[..., None])[..., 0]  # (rows, W)
            self.loss -= right[asked].clamp_min(TINY).log().double().sum()

    def of_all_processes(self) -> tuple[Tensor, float, int]:
        """Counts of pixels ``(classes, classes)``, the sum of their losses, the number of images."""
        counts = of_all_processes(self.confusion.confmat.cpu().clone())
        sums = of_all_processes(torch.tensor([self.loss.item(), self.images], dtype=torch.float64))
        return counts, sums[0].item(), int(sums[1])


# How well pixels are classified, all figures from one confusion matrix over all images.


@dataclass(frozen=True)
class SegmentEvaluation:
    """How well a model classifies the pixels of the images that could be read.

    A class that is neither in the truth nor predicted has no figures and does not count in the means. One
    that is predicted although it is nowhere in the truth has an IoU of 0, which does count.
    """

    confusion: Tensor  # (classes, classes) counts of pixels: rows are the truth, columns what the model said
    loss: float  # mean cross-entropy per pixel, without label smoothing
    images: int  # how many were read and judged
    unreadable: tuple[BadImage, ...]  # the others, by path and reason; of several processes, this one's

    @property
    def iou(self) -> list[float | None]:
        """Per class, right / (in the truth or predicted)."""
        right, truth, said = self._counts()
        return _ratios(right, truth + said - right)

    @property
    def class_accuracy(self) -> list[float | None]:
        """Per class, the share of its pixels that were found."""
        right, truth, _ = self._counts()
        return _ratios(right, truth)

    @property
    def miou(self) -> float:
        """Mean of the classes' IoU."""
        return _mean(self.iou)

    @property
    def pixel_accuracy(self) -> float:
        """The share of all pixels that are right."""
        right, truth, _ = self._counts()
        return (right.sum() / truth.sum()).item()

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "loss": self.loss,
            "miou": self.miou,
            "pixel_accuracy": self.pixel_accuracy,
            "class_accuracy": _mean(self.class_accuracy),
        }

    def _counts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Per class ``(classes,)``: pixels that are right, in the truth, predicted."""
        counts = self.confusion.double()
        return counts.diagonal(), counts.sum(1), counts.sum(0)


def _ratios(parts: Tensor, wholes: Tensor) -> list[float | None]:
    return [p / w if w else None for p, w in zip(parts.tolist(), wholes.tolist(), strict=True)]


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known)


# What a segmentation model is trained to make small.


@dataclass(frozen=True, kw_only=True)
class SegmentLoss:
    """Cross-entropy over the pixels that have a class, and ``auxiliary`` times that of the auxiliary head."""

    smoothing: float = 0.0  # how much of each label is spread over the other classes
    auxiliary: float = 0.4
    class_weights: Mapping[str, float] = field(default_factory=dict)  # of some classes; the others weigh 1

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise UserError(f"smoothing={self.smoothing} must be at least 0 and less than 1")
        if self.auxiliary < 0:
            raise UserError(f"auxiliary={self.auxiliary} must be at least 0")
        for name, weight in self.class_weights.items():
            if weight < 0:
                raise UserError(f"class_weights: {weight} of {name!r} must be at least 0")

    def weights(self, classes: Sequence[str]) -> Tensor | None:
        """The weight of every class ``(classes,)``, None if all are 1."""
        for name in self.class_weights:
            if name not in classes:
                raise unknown("class in class_weights", name, classes)
        if not self.class_weights:
            return None
        return torch.tensor([float(self.class_weights.get(name, 1.0)) for name in classes])


def loss_of(
    logits: Tensor, masks: Tensor, *, weights: Tensor | None = None, smoothing: float = 0.0
) -> Tensor:
    """Mean cross-entropy of ``logits (B, classes, H, W)`` over the pixels of ``masks (B, H, W)``, in float32.

    Pixels of class 255 are left out. With ``weights (classes,)`` it is the weighted mean. If nothing is
    left to learn from, it is 0.
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
    asked = targets != IGNORE
    if weights is None:
        share = asked.sum().float()
    else:
        share = weights[torch.where(asked, targets, 0)].masked_fill(~asked, 0).sum()
    return total / share.clamp_min(torch.finfo(torch.float32).tiny)
