"""Evaluation of a detector by COCO's average precision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from visualtokens.data.annotations import masks_library, to_run_lengths
from visualtokens.data.decode import BadImage
from visualtokens.data.detection import DetectionBatch, Objects, to_floats
from visualtokens.errors import UserError
from visualtokens.modes import eval_mode
from visualtokens.progress import count, track
from visualtokens.tables import table
from visualtokens.tasks.detect.detections import Detections, from_detector

SHOWN = 30  # classes in the table of an evaluation
Record = dict[str, Any]
Size = tuple[int, int]


@dataclass(frozen=True)
class Precision:
    """Mean average precision over the classes that have objects, each from 0 to 1.

    None where there are no objects to find.
    """

    ap: float  # mean over the IoU thresholds 0.5, 0.55, …, 0.95
    ap50: float  # at IoU 0.5
    ap75: float
    small: float | None  # ap of objects below 32² pixels
    medium: float | None
    large: float | None  # ap of objects from 96² pixels
    by_class: tuple[float | None, ...]  # ap of each class


@dataclass(frozen=True)
class Evaluation:
    """COCO metrics over the readable images."""

    boxes: Precision
    masks: Precision | None  # None for a detector without masks
    images: int  # evaluated
    objects: int  # annotated on them, without crowds
    unreadable: tuple[BadImage, ...]  # with several processes, those of this one

    @property
    def metrics(self) -> dict[str, float]:
        values = {"box_ap": self.boxes.ap, "box_ap50": self.boxes.ap50, "box_ap75": self.boxes.ap75}
        if self.masks is not None:
            values |= {"mask_ap": self.masks.ap, "mask_ap50": self.masks.ap50, "mask_ap75": self.masks.ap75}
        return values

    def to_dict(self, classes: Sequence[str]) -> dict[str, Any]:
        return {
            **self.metrics,
            "images": self.images,
            "objects": self.objects,
            "classes": list(classes),
            "boxes": asdict(self.boxes),
            "masks": None if self.masks is None else asdict(self.masks),
        }

    def text(self, classes: Sequence[str]) -> str:
        kinds = {"boxes": self.boxes} | ({"masks": self.masks} if self.masks else {})
        rows = [
            (kind, *map(_percent, (p.ap, p.ap50, p.ap75, p.small, p.medium, p.large)))
            for kind, p in kinds.items()
        ]
        header = ("", "AP", "AP50", "AP75", "small", "medium", "large")
        head = f"{self.objects} objects on {self.images} images\n\n"
        head += table(rows, header=header, right=range(1, 7))
        present = sorted((ap, i) for i, ap in enumerate(self.boxes.by_class) if ap is not None)
        weak = [(classes[i], _percent(ap)) for ap, i in present[:SHOWN]]
        more = len(present) - len(weak)
        foot = f"\n… and {more} classes that do better; --json has all" if more else ""
        return f"{head}\n\n" + table(weak, header=("class", "box AP"), right=(1,)) + foot


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def evaluate(
    model: nn.Module, batches: Iterable[DetectionBatch], *, classes: int, progress: bool | None = None
) -> Evaluation:
    """Evaluate a detector on every image of the batches, on the device of the model.

    Crowds are neither hits nor misses, and classes without objects do not count. On images without objects,
    every detection is a false positive. Data without any object raise :class:`UserError`. Unreadable images
    are returned. Every process passes its share of the images and gets the metrics of all.
    """
    comparison, unreadable = Comparison(), list[BadImage]()
    masks = False
    with eval_mode(model):
        for batch in track(batches, "evaluate", shown=progress):
            unreadable.extend(batch.bad)
            masks |= _compare(model, batch, comparison)
    comparison, masks = _over_processes(comparison, masks)
    if not comparison.images:
        raise UserError(f"nothing to evaluate: {count(len(unreadable), 'image')} could not be read")
    return Evaluation(
        boxes=comparison.precision("bbox", classes=classes),
        masks=comparison.precision("segm", classes=classes) if masks else None,
        images=len(comparison.images),
        objects=comparison.objects,
        unreadable=tuple(unreadable),
    )


@torch.inference_mode()
def _compare(model: nn.Module, batch: DetectionBatch, comparison: Comparison) -> bool:
    """Add the detections of a batch; return whether they have masks."""
    if not len(batch):
        return False
    device = next(model.parameters()).device
    found = [from_detector(each) for each in model([to_floats(image.to(device)) for image in batch.images])]
    for index, image, objects, detections in zip(
        batch.index.tolist(), batch.images, batch.objects, found, strict=True
    ):
        comparison.add(index, (image.shape[1], image.shape[2]), objects, detections)
    return found[0].masks is not None


def _over_processes(comparison: Comparison, masks: bool) -> tuple[Comparison, bool]:
    if not (dist.is_available() and dist.is_initialized()):
        return comparison, masks
    parts: list[tuple[Comparison, bool]] = [(comparison, masks)] * dist.get_world_size()
    dist.all_gather_object(parts, (comparison, masks))
    whole = Comparison()
    for part, _ in parts:
        whole.merge(part)
    return whole, any(has for _, has in parts)


class Comparison:
    """Annotations and detections of the images so far, as COCO records; picklable."""

    def __init__(self) -> None:
        self.images: list[Record] = []
        self.truth: list[Record] = []
        self.found: list[Record] = []

    def add(self, image: int, size: Size, objects: Objects, detections: Detections) -> None:
        """Add an image with a unique number and its ``size`` (H, W)."""
        self.images.append({"id": image, "height": size[0], "width": size[1]})
        crowd, area = objects.crowd.tolist(), objects.area.tolist()
        for i, record in enumerate(_records(image, objects, masks=detections.masks is not None)):
            self.truth.append(record | {"iscrowd": int(crowd[i]), "area": area[i]})
        scores = detections.scores.tolist()
        for i, record in enumerate(_records(image, detections, masks=True)):
            self.found.append(record | {"score": scores[i]})

    def merge(self, other: Comparison) -> None:
        self.images += other.images
        self.truth += other.truth
        self.found += other.found

    @property
    def objects(self) -> int:
        """Number of annotated objects, without crowds."""
        return sum(not record["iscrowd"] for record in self.truth)

    def precision(self, kind: Literal["bbox", "segm"], *, classes: int) -> Precision:
        """Return the average precision of boxes or masks, by faster-coco-eval."""
        if not self.objects:
            raise UserError(
                f"average precision is not defined: no objects on {count(len(self.images), 'image')}"
            )
        masks_library()  # names the extra if the library is missing
        from faster_coco_eval import COCO, COCOeval_faster

        categories = [{"id": i + 1, "name": str(i)} for i in range(classes)]
        numbered = [dict(record, id=i) for i, record in enumerate(self.truth, start=1)]  # 0 means "no match"
        truth = COCO({"images": self.images, "annotations": numbered, "categories": categories})
        # A result with a box counts as a box, whatever else it has.
        unused = "bbox" if kind == "segm" else "segmentation"
        results = [{k: v for k, v in record.items() if k != unused} for record in self.found]
        coco = COCOeval_faster(truth, truth.loadRes(results), iouType=kind, print_function=_silent)
        coco.evaluate()
        coco.accumulate()
        # (IoU thresholds, recalls, classes, sizes); -1 where a class has no objects
        values = coco.eval["precision"][..., -1]
        thresholds = coco.params.iouThrs
        all_sizes = values[..., 0]
        return Precision(
            ap=_mean(all_sizes) or 0.0,
            ap50=_mean(all_sizes[np.isclose(thresholds, 0.5)]) or 0.0,
            ap75=_mean(all_sizes[np.isclose(thresholds, 0.75)]) or 0.0,
            small=_mean(values[..., 1]),
            medium=_mean(values[..., 2]),
            large=_mean(values[..., 3]),
            by_class=tuple(_mean(values[:, :, k, 0]) for k in range(classes)),
        )


def _records(image: int, items: Objects | Detections, *, masks: bool) -> list[Record]:
    """Return a COCO record per object, with run lengths if ``masks``."""
    boxes = items.boxes.double().numpy()
    records = []
    for i, (left, top, right, bottom) in enumerate(boxes.tolist()):
        record: Record = {
            "image_id": image,
            "category_id": int(items.labels[i]) + 1,
            "bbox": [left, top, right - left, bottom - top],
        }
        if masks and items.masks is not None:
            record["segmentation"] = to_run_lengths(items.masks[i].numpy())
        records.append(record)
    return records


def _mean(values: NDArray[np.float64]) -> float | None:
    known = values[values > -1]
    return float(known.mean()) if known.size else None


def _silent(*_: object) -> None:
    """Discard the progress messages of faster-coco-eval."""
