"""One label per image: the loss to train with, and the evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from visualtokens.data import BadImage, Batch
from visualtokens.errors import UserError


@dataclass(frozen=True)
class Evaluation:
    """How well a model labels the images that could be read."""

    accuracy: float  # share of the images that were read
    loss: float  # mean cross-entropy, without label smoothing
    confusion: Tensor  # (classes, classes) counts: rows are the truth, columns what the model said
    images: int  # how many were read and judged
    unreadable: tuple[BadImage, ...]  # the others, by path and reason


def loss_of(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy of ``logits (B, classes)``, computed in float32."""
    return F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)


def evaluate(
    model: nn.Module, loader: Iterable[Batch], *, classes: int, progress: bool | None = None
) -> Evaluation:
    """Judge the model on every image of the loader, on the device the model is on.

    Images that cannot be read count for nothing and are returned. ``progress`` shows a bar; None shows it
    on a terminal only. The model comes back in the mode it was in.
    """
    # Here, because torchmetrics takes seconds to import and only evaluation needs it.
    from torchmetrics.classification import MulticlassConfusionMatrix

    device = next(model.parameters()).device
    confusion = MulticlassConfusionMatrix(classes).to(device)
    unreadable: list[BadImage] = []
    images, loss_sum = 0, 0.0
    with _eval_mode(model), torch.inference_mode():
        for batch in tqdm(
            loader, desc="evaluate", leave=False, disable=None if progress is None else not progress
        ):
            unreadable.extend(batch.bad)
            if len(batch.images) == 0:
                continue
            labels = batch.labels.to(device)
            logits = model(batch.images.to(device))  # (B, classes)
            confusion.update(logits, labels)
            loss_sum += loss_of(logits, labels).item() * len(labels)
            images += len(labels)
    if images == 0:
        raise UserError(f"nothing to evaluate: none of the {len(unreadable)} images could be read")
    counts = confusion.compute().cpu()  # (classes, classes)
    return Evaluation(
        accuracy=int(counts.diagonal().sum()) / images,
        loss=loss_sum / images,
        confusion=counts,
        images=images,
        unreadable=tuple(unreadable),
    )


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards every submodule has its own flag back."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
