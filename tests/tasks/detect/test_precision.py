"""COCO's figures against pycocotools, on boxes and masks drawn at random."""

from __future__ import annotations

import contextlib
import io
from typing import Any, Literal

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from visualtokens.data.detection import Objects
from visualtokens.errors import UserError
from visualtokens.tasks.detect.detections import Detections
from visualtokens.tasks.detect.evaluation import Comparison, Precision

SIDE, CLASSES = 120, 4
SIZE = (SIDE, SIDE)


def boxes_at_random(rng: np.random.Generator, count: int) -> torch.Tensor:
    corner = rng.uniform(0, SIDE * 0.6, (count, 2))
    return torch.tensor(np.concatenate([corner, corner + rng.uniform(4, SIDE * 0.4, (count, 2))], 1)).float()


def masks_of(boxes: torch.Tensor) -> torch.Tensor:
    masks = torch.zeros(len(boxes), *SIZE, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
        mask[top:bottom, left:right] = True
        mask[top : top + (bottom - top) // 3, left : left + (right - left) // 3] = False
    return masks


def objects_of(boxes: torch.Tensor, labels: list[int], crowd: list[bool] | None = None) -> Objects:
    masks = masks_of(boxes)
    flags = torch.tensor(crowd or [False] * len(labels), dtype=torch.bool)
    return Objects(boxes, torch.tensor(labels).long(), masks, flags, masks.sum((1, 2)).float())


def detections_of(boxes: torch.Tensor, labels: list[int], scores: list[float]) -> Detections:
    return Detections(boxes, torch.tensor(labels).long(), torch.tensor(scores), masks_of(boxes))


def at_random(seed: int) -> Comparison:
    """Images with none to six objects of the first three classes, some crowds, and shaky detections."""
    rng, comparison = np.random.default_rng(seed), Comparison()
    for image in range(12):
        count = int(rng.integers(0, 7))
        boxes = boxes_at_random(rng, count)
        labels = rng.integers(0, CLASSES - 1, count).tolist()
        objects = objects_of(boxes, labels, (rng.random(count) < 0.2).tolist())
        guesses = torch.cat(
            [boxes + torch.tensor(rng.normal(0, 2, boxes.shape)).float(), boxes_at_random(rng, 2)]
        )
        guesses[:, 2:] = torch.maximum(guesses[:, 2:], guesses[:, :2] + 2)
        predicted = [*labels, *rng.integers(0, CLASSES, 2).tolist()]
        scores = rng.random(len(predicted)).round(2).tolist()
        comparison.add(image, SIZE, objects, detections_of(guesses.clamp(0, SIDE), predicted, scores))
    return comparison


def by_pycocotools(comparison: Comparison, kind: str) -> list[float]:
    """AP, AP50, AP75, small, medium, large; -1 where there is nothing to find."""
    truth = COCO()
    annotations: list[dict[str, Any]] = [dict(a, id=i + 1) for i, a in enumerate(comparison.truth)]
    categories = [{"id": i + 1, "name": str(i)} for i in range(CLASSES)]
    with contextlib.redirect_stdout(io.StringIO()):
        truth.dataset = {"images": comparison.images, "annotations": annotations, "categories": categories}
        truth.createIndex()
        unused = "bbox" if kind == "segm" else "segmentation"
        results = [{k: v for k, v in found.items() if k != unused} for found in comparison.found]
        coco = COCOeval(truth, truth.loadRes(results), kind)
        coco.evaluate()
        coco.accumulate()
        coco.summarize()
    return coco.stats[:6].tolist()


def figures(precision: Precision) -> list[float]:
    values = (
        precision.ap,
        precision.ap50,
        precision.ap75,
        precision.small,
        precision.medium,
        precision.large,
    )
    return [-1.0 if value is None else value for value in values]


@pytest.mark.parametrize("kind", ["bbox", "segm"])
@pytest.mark.parametrize("seed", range(2))
def test_metrics_equal_pycocotools(seed: int, kind: Literal["bbox", "segm"]) -> None:
    comparison = at_random(seed)
    ours = comparison.precision(kind, classes=CLASSES)
    assert 0 < ours.ap < 1
    assert figures(ours) == pytest.approx(by_pycocotools(comparison, kind), abs=1e-9)
    assert ours.by_class[CLASSES - 1] is None  # no object has the last class: it counts for nothing
    known = [value for value in ours.by_class if value is not None]
    assert ours.ap == pytest.approx(sum(known) / len(known))


@pytest.mark.parametrize("kind", ["bbox", "segm"])
def test_perfect_and_empty_detections(kind: Literal["bbox", "segm"]) -> None:
    boxes = torch.tensor([[10.0, 10, 60, 60], [70, 20, 110, 90]])
    perfect, nothing = Comparison(), Comparison()
    perfect.add(0, SIZE, objects_of(boxes, [0, 1]), detections_of(boxes, [0, 1], [0.9, 0.8]))
    nothing.add(0, SIZE, objects_of(boxes, [0, 1]), detections_of(boxes[:0], [], []))
    assert perfect.precision(kind, classes=CLASSES).ap == pytest.approx(1)
    assert nothing.precision(kind, classes=CLASSES).ap == 0


def test_a_crowd_is_neither_hit_nor_miss() -> None:
    boxes = torch.tensor([[10.0, 10, 60, 60], [70, 20, 110, 90]])
    comparison = Comparison()
    objects = objects_of(boxes, [0, 0], [False, True])
    comparison.add(0, SIZE, objects, detections_of(boxes, [0, 0], [0.5, 0.9]))
    assert comparison.objects == 1
    assert comparison.precision("bbox", classes=1).ap == pytest.approx(1)


def test_without_any_object_precision_is_not_defined() -> None:
    comparison = Comparison()
    empty = boxes_at_random(np.random.default_rng(0), 0)
    comparison.add(0, SIZE, objects_of(empty, []), detections_of(empty, [], []))
    with pytest.raises(UserError, match=r"no objects on 1 image$"):
        comparison.precision("bbox", classes=2)


def test_parts_of_several_processes_make_up_the_whole() -> None:
    whole, merged = at_random(0), Comparison()
    first, second = Comparison(), Comparison()
    for part, even in ((first, 0), (second, 1)):
        part.images = [i for i in whole.images if i["id"] % 2 == even]
        part.truth = [t for t in whole.truth if t["image_id"] % 2 == even]
        part.found = [f for f in whole.found if f["image_id"] % 2 == even]
        merged.merge(part)
    assert merged.precision("bbox", classes=CLASSES) == whole.precision("bbox", classes=CLASSES)
