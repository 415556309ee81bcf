"""How well a detector finds the objects of images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from visualtokens.data.decode import BadImage
from visualtokens.data.detection_batch import DetectionBatch
from visualtokens.data.detection_sizes import to_floats
from visualtokens.errors import UserError
from visualtokens.tasks.detect.detections import from_detector
from visualtokens.tasks.detect.precision import Comparison, Precision
from visualtokens.tasks.judging import eval_mode


@dataclass(frozen=True)
class Evaluation:
    """COCO's figures for the images that could be read."""

    boxes: Precision
    masks: Precision | None  # of a detector that gives masks
    images: int  # how many were read and judged
    objects: int  # that were to be found on them
    unreadable: tuple[BadImage, ...]  # the others, by path and reason; of several processes, this one's

    @property
    def metrics(self) -> dict[str, float]:
        figures = {"box_ap": self.boxes.ap, "box_ap50": self.boxes.ap50, "box_ap75": self.boxes.ap75}
        if self.masks is not None:
            figures |= {"mask_ap": self.masks.ap, "mask_ap50": self.masks.ap50, "mask_ap75": self.masks.ap75}
        return figures


def evaluate(
    model: nn.Module, batches: Iterable[DetectionBatch], *, classes: int, progress: bool | None = None
) -> Evaluation:
    """Judge a detector on every image of the batches, on the device the model is on.

    Crowds are neither hits nor misses, classes without objects count for nothing, and images without
    objects only for what is wrongly found on them. Without any object there is nothing to judge: an error.
    Images that cannot be read are returned. Where several processes run, each gives its share of the
    images, and every one gets the figures of all. The model is left in the mode it was in.
    """
    comparison, unreadable = Comparison(), list[BadImage]()
    masks = False
    with eval_mode(model):
        for batch in tqdm(
            batches, desc="evaluate", leave=False, disable=None if progress is None else not progress
        ):
            unreadable.extend(batch.bad)
            masks |= _compare(model, batch, comparison)
    comparison, masks = _of_all_processes(comparison, masks)
    if not comparison.images:
        raise UserError(f"nothing to evaluate: none of the {len(unreadable)} images could be read")
    return Evaluation(
        boxes=comparison.precision("bbox", classes=classes),
        masks=comparison.precision("segm", classes=classes) if masks else None,
        images=len(comparison.images),
        objects=comparison.objects,
        unreadable=tuple(unreadable),
    )


@torch.inference_mode()
def _compare(model: nn.Module, batch: DetectionBatch, comparison: Comparison) -> bool:
    """Whether the detector gave masks."""
    if not len(batch):
        return False
    device = next(model.parameters()).device
    found = [from_detector(each) for each in model([to_floats(image.to(device)) for image in batch.images])]
    for index, image, objects, detections in zip(
        batch.index.tolist(), batch.images, batch.objects, found, strict=True
    ):
        comparison.add(index, (image.shape[1], image.shape[2]), objects, detections)
    return found[0].masks is not None


def _of_all_processes(comparison: Comparison, masks: bool) -> tuple[Comparison, bool]:
    if not (dist.is_available() and dist.is_initialized()):
        return comparison, masks
    parts: list[tuple[Comparison, bool]] = [(comparison, masks)] * dist.get_world_size()
    dist.all_gather_object(parts, (comparison, masks))
    whole = Comparison()
    for part, _ in parts:
        whole.merge(part)
    return whole, any(has for _, has in parts)
