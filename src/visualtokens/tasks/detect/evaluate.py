"""How well a detector finds the objects of images."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from visualtokens.data.coco import masks_library, to_run_lengths
from visualtokens.data.decode import BadImage
from visualtokens.data.detection import DetectionBatch, Objects, to_floats
from visualtokens.errors import UserError
from visualtokens.tasks.detect.detections import Detections, from_detector
from visualtokens.tasks.task import eval_mode


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


# Average precision as COCO defines it, by faster-coco-eval.

Record = dict[str, Any]
Size = tuple[int, int]


@dataclass(frozen=True)
class Precision:
    """Mean average precision over the classes that have objects; each figure from 0 to 1.

    None where there are no such objects to be found.
    """

    ap: float  # mean over the overlaps 0.5, 0.55, …, 0.95
    ap50: float  # at an overlap of 0.5
    ap75: float
    small: float | None  # ap of objects below 32² pixels
    medium: float | None
    large: float | None  # from 96² pixels on
    by_class: tuple[float | None, ...]  # ap of each class


class Comparison:
    """Collects truth and detections, image by image. What it holds can be sent between processes."""

    def __init__(self) -> None:
        self.images: list[Record] = []
        self.truth: list[Record] = []
        self.found: list[Record] = []

    def add(self, image: int, size: Size, objects: Objects, detections: Detections) -> None:
        """``image`` is a number that no other image has, ``size`` its height and width."""
        self.images.append({"id": image, "height": size[0], "width": size[1]})
        crowd, area = objects.crowd.tolist(), objects.area.tolist()
        for i, record in enumerate(_records(image, objects, ours=detections.masks is not None)):
            self.truth.append(record | {"iscrowd": int(crowd[i]), "area": area[i]})
        scores = detections.scores.tolist()
        for i, record in enumerate(_records(image, detections, ours=True)):
            self.found.append(record | {"score": scores[i]})

    def merge(self, other: Comparison) -> None:
        self.images += other.images
        self.truth += other.truth
        self.found += other.found

    @property
    def objects(self) -> int:
        """That can be found: those of crowds do not count."""
        return sum(not record["iscrowd"] for record in self.truth)

    def precision(self, kind: Literal["bbox", "segm"], *, classes: int) -> Precision:
        """Judge boxes or masks."""
        if not self.objects:
            raise UserError(
                f"average precision is not defined: none of the {len(self.images)} images has an object on it"
            )
        return _judge(self.images, self.truth, self.found, kind, classes)


def _records(image: int, things: Objects | Detections, *, ours: bool) -> list[Record]:
    """A COCO record per object; ``ours`` says whether masks are wanted."""
    boxes = things.boxes.double().numpy()
    records = []
    for i, (left, top, right, bottom) in enumerate(boxes.tolist()):
        record: Record = {
            "image_id": image,
            "category_id": int(things.labels[i]) + 1,
            "bbox": [left, top, right - left, bottom - top],
        }
        if ours and things.masks is not None:
            record["segmentation"] = to_run_lengths(things.masks[i].numpy())
        records.append(record)
    return records


def _judge(
    images: Sequence[Record], truth: Sequence[Record], found: Sequence[Record], kind: str, classes: int
) -> Precision:
    masks_library()  # names the extra if the library is missing
    from faster_coco_eval import COCO, COCOeval_faster

    categories = [{"id": i + 1, "name": str(i)} for i in range(classes)]
    numbered = [dict(record, id=i) for i, record in enumerate(truth, start=1)]  # 0 would mean "no match"
    known = COCO({"images": list(images), "annotations": numbered, "categories": categories})
    # A result with a box is taken for a box, whatever else it has.
    unused = "bbox" if kind == "segm" else "segmentation"
    results = [{k: v for k, v in copy.copy(record).items() if k != unused} for record in found]
    judge = COCOeval_faster(known, known.loadRes(results), iouType=kind, print_function=_silent)
    judge.evaluate()
    judge.accumulate()
    # (overlaps, recalls, classes, sizes, most detections); -1 where a class has no objects
    values = judge.eval["precision"][..., -1]
    overlaps = judge.params.iouThrs
    by_class = tuple(_mean(values[:, :, k, 0]) for k in range(classes))
    whole = values[..., 0]
    return Precision(
        ap=_mean(whole) or 0.0,
        ap50=_mean(whole[np.isclose(overlaps, 0.5)]) or 0.0,
        ap75=_mean(whole[np.isclose(overlaps, 0.75)]) or 0.0,
        small=_mean(values[..., 1]),
        medium=_mean(values[..., 2]),
        large=_mean(values[..., 3]),
        by_class=by_class,
    )


def _mean(values: NDArray[np.float64]) -> float | None:
    known = values[values > -1]
    return float(known.mean()) if known.size else None


def _silent(*_: object) -> None:
    """faster-coco-eval tells its progress through a function."""
