"""Judging a segmentation model at the full size of every image."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

from visualtokens.data import BadImage
from visualtokens.data.masks import IGNORE
from visualtokens.data.segmentation import mirrored_classes
from visualtokens.data.segmentation_loader import SegmentBatch
from visualtokens.errors import UserError
from visualtokens.tasks.judging import eval_mode, of_all_processes
from visualtokens.tasks.segment.inference import Inference, probabilities
from visualtokens.tasks.segment.metrics import SegmentEvaluation

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
