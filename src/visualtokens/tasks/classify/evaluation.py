"""Classification loss, evaluation and prediction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.data import BadImage, Batch, Preprocess
from visualtokens.errors import UserError
from visualtokens.modes import eval_mode
from visualtokens.progress import count, track
from visualtokens.tables import table
from visualtokens.tasks.evaluation import sum_over_processes
from visualtokens.tasks.prediction import TOP, Classification, check_top

SHOWN = 30  # classes in the table of an evaluation


def loss_of(logits: Tensor, targets: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of ``logits (B, classes)``, computed in float32.

    ``targets`` are labels ``(B,)``, or class probabilities ``(B, classes)``, which are not smoothed again.
    """
    if targets.ndim == 2:
        return SoftTargetCrossEntropy()(logits.float(), targets)
    return F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)


@dataclass(frozen=True)
class ClassifyEvaluation:
    """Accuracy, loss and confusion matrix over the readable images."""

    accuracy: float
    loss: float  # mean cross-entropy, without label smoothing
    confusion: Tensor  # (classes, classes) counts: rows are the labels, columns the predictions
    images: int  # evaluated
    unreadable: tuple[BadImage, ...]  # with several processes, those of this one

    @property
    def metrics(self) -> dict[str, float]:
        return {"accuracy": self.accuracy, "loss": self.loss}

    def to_dict(self, classes: Sequence[str]) -> dict[str, Any]:
        return {
            **self.metrics,
            "images": self.images,
            "classes": list(classes),
            "confusion": self.confusion.tolist(),
        }

    def text(self, classes: Sequence[str]) -> str:
        counts = self.confusion
        correct = f"{int(counts.diagonal().sum())} of {self.images} images"
        head = f"accuracy {self.accuracy:.1%} ({correct}), loss {self.loss:.3f}"
        present = [i for i in range(len(classes)) if counts[i].sum() > 0]
        worst = sorted(present, key=lambda i: (counts[i, i] / counts[i].sum()).item())[:SHOWN]
        rows = [_row(classes, i, counts[i].tolist()) for i in worst]
        more = len(present) - len(worst)
        foot = f"\n… and {more} classes that do better; --json has all" if more else ""
        header = ("class", "images", "right", "mistaken for")
        return f"{head}\n\n" + table(rows, header=header, right=(1, 2)) + foot


def _row(classes: Sequence[str], label: int, counts: list[int]) -> tuple[str, str, str, str]:
    """Return a class, its number of images, its accuracy and its two most common confusions."""
    total = sum(counts)
    wrong = sorted(((n, i) for i, n in enumerate(counts) if n and i != label), key=lambda pair: -pair[0])
    mistakes = ", ".join(f"{_short(classes[i])} ({n}×)" for n, i in wrong[:2])
    return _short(classes[label]), str(total), f"{counts[label] / total:.1%}", mistakes


def _short(name: str) -> str:
    return name if len(name) <= 24 else name[:23] + "…"


def evaluate(
    model: nn.Module, loader: Iterable[Batch], *, classes: int, progress: bool | None = None
) -> ClassifyEvaluation:
    """Evaluate the model on every image of the loader, on the device of the model.

    Unreadable images are not counted but returned. ``progress`` shows a bar; None shows it on a terminal
    and logs the progress elsewhere. Every process passes its share of the images and gets the metrics of all.
    """
    # torchmetrics takes seconds to import, and only evaluation needs it.
    from torchmetrics.classification import MulticlassConfusionMatrix

    device = next(model.parameters()).device
    confusion = MulticlassConfusionMatrix(classes, sync_on_compute=False).to(device)
    unreadable: list[BadImage] = []
    loss_sum = 0.0
    with eval_mode(model), torch.inference_mode():
        for batch in track(loader, "evaluate", shown=progress):
            unreadable.extend(batch.bad)
            if len(batch) == 0:
                continue
            labels = batch.labels.to(device)
            logits = model(batch.images.to(device))  # (B, classes)
            confusion.update(logits, labels)
            loss_sum += loss_of(logits, labels).item() * len(labels)
    counts = sum_over_processes(confusion.confmat.cpu().clone())  # (classes, classes)
    images = int(counts.sum())
    if images == 0:
        raise UserError(f"nothing to evaluate: {count(len(unreadable), 'image')} could not be read")
    return ClassifyEvaluation(
        accuracy=int(counts.diagonal().sum()) / images,
        loss=sum_over_processes(torch.tensor(loss_sum, dtype=torch.float64)).item() / images,
        confusion=counts,
        images=images,
        unreadable=tuple(unreadable),
    )


# Prediction.


def predict(
    model: nn.Module,
    image: Image.Image,
    *,
    preprocess: Preprocess,
    classes: Sequence[str],
    top: int = TOP,
) -> Classification:
    """Return the class probabilities of an RGB image; its dictionary and text show the ``top`` classes."""
    return predict_batch(model, [preprocess(image)], classes=classes, top=top)[0]


def predict_batch(
    model: nn.Module, inputs: Sequence[Tensor], *, classes: Sequence[str], top: int = TOP
) -> list[Classification]:
    """Return the class probabilities of preprocessed images, each ``(3, H, W)``; see :func:`predict`."""
    check_top(top)
    if not inputs:
        return []
    x = torch.stack(list(inputs)).to(next(model.parameters()).device)  # (B, 3, H, W)
    with eval_mode(model), torch.inference_mode():
        probabilities = model(x).float().softmax(1).cpu()  # (B, classes)
    return [Classification(each, classes, top) for each in probabilities]
