"""Average precision as COCO defines it, by faster-coco-eval."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from visualtokens.data.coco_masks import masks_library, to_run_lengths
from visualtokens.data.detection import Objects
from visualtokens.errors import UserError
from visualtokens.tasks.detect.detections import Detections

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
