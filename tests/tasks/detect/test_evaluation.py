"""Evaluation, prediction and pictures, with detectors that return given objects."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from visualtokens.data import BadImage, open_detection
from visualtokens.data.detection import DetectionBatch, DetectionDataset, Objects, create_detection_loader
from visualtokens.errors import UserError
from visualtokens.tasks.detect import evaluate, predict
from visualtokens.tasks.detect.detections import from_detector, to_target

SCENES = open_detection("digit_scenes:48x64", "val")


class Oracle(nn.Module):
    """Knows the scenes by their pixels and answers with the truth."""

    def __init__(self, *, masks: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.masks = masks

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        assert not self.training
        return [self.answer(image) for image in images]

    def answer(self, image: Tensor) -> dict[str, Tensor]:
        for index in range(4):
            scene, objects = SCENES[index]
            pixels = torch.from_numpy(np.array(scene)).permute(2, 0, 1) / 255
            if pixels.shape == image.shape and torch.allclose(pixels, image, atol=1e-6):
                found = to_target(objects) | {"scores": torch.ones(len(objects))}
                masks = {"masks": objects.masks} if self.masks and objects.masks is not None else {}
                return {k: v for k, v in found.items() if k != "masks"} | masks
        raise AssertionError("an image that is none of the scenes")


class Four(DetectionDataset):
    spec, classes = "four", SCENES.classes

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Image.Image, Objects]:
        if index == 2:
            raise BadImage("four[2]", "broken")
        return SCENES[index if index < 2 else index - 1]

    def path(self, index: int) -> str:
        return f"four[{index}]"


def test_perfect_detections_and_unreadable_images() -> None:
    model = Oracle().train()
    evaluation = evaluate(
        model, create_detection_loader(Four(), batch=2, sizing=None), classes=10, progress=False
    )
    assert evaluation.metrics == pytest.approx(
        dict.fromkeys(("box_ap", "box_ap50", "box_ap75", "mask_ap", "mask_ap50", "mask_ap75"), 1.0)
    )
    assert (evaluation.images, [bad.path for bad in evaluation.unreadable]) == (4, ["four[2]"])
    assert evaluation.objects == sum(len(SCENES[i][1]) for i in range(4))
    assert model.training


def test_detector_without_masks_has_no_mask_metrics() -> None:
    loader = create_detection_loader(Four(), batch=2, sizing=None)
    evaluation = evaluate(Oracle(masks=False), loader, classes=10, progress=False)
    assert evaluation.masks is None
    assert set(evaluation.metrics) == {"box_ap", "box_ap50", "box_ap75"}


def test_no_readable_image_is_an_error() -> None:
    batch = DetectionBatch((), (), torch.zeros(0, dtype=torch.int64), (BadImage("a", "broken"),))
    with pytest.raises(UserError, match="nothing to evaluate: 1 image could not be read"):
        evaluate(Oracle(), [batch], classes=10, progress=False)


def test_labels_count_from_one_in_detectors_and_from_zero_outside() -> None:
    objects = SCENES[0][1]
    target = to_target(objects)
    assert torch.equal(target["labels"], objects.labels + 1)
    assert target["masks"].dtype == torch.uint8
    scores = torch.linspace(0.1, 0.9, len(objects))
    found = from_detector(target | {"scores": scores})
    assert torch.equal(found.labels, objects.labels.flip(0))  # highest score first
    assert len(found.above(0.5)) == int((scores >= 0.5).sum())


def test_predict_and_its_dictionary() -> None:
    image, objects = SCENES[1]
    found = predict(Oracle().eval(), image)
    assert sorted(found.labels.tolist()) == sorted(objects.labels.tolist())
    first = json.loads(json.dumps(found.to_dicts(SCENES.classes)))[0]
    assert set(first) == {"class", "score", "box", "mask_pixels"}
    with pytest.raises(UserError, match="training mode"):
        predict(Oracle().train(), image)
    with pytest.raises(UserError, match=r"score=1\.5"):
        predict(Oracle().eval(), image, score=1.5)


@pytest.mark.parametrize("name", ["mask_rcnn", "faster_rcnn", "retinanet"])
def test_predict_with_a_real_detector(small: Callable[..., Any], name: str) -> None:
    found = predict(small(name).eval(), Image.new("RGB", (50, 30)), score=0.0)
    assert (found.masks is None) == (name != "mask_rcnn")
    assert found.masks is None or found.masks.shape[1:] == (30, 50)


@pytest.mark.parametrize("name", ["mask_rcnn", "faster_rcnn", "retinanet"])
def test_evaluation_in_mixed_precision(small: Callable[..., Any], name: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = predict(small(name).eval(), Image.new("RGB", (50, 30)), score=0.0)
    assert found.boxes.dtype == found.scores.dtype == torch.float32
    assert found.masks is None or found.masks.dtype == torch.bool


def test_detections_of_equal_score_have_one_order() -> None:
    """By label, then by the left and top edge, whatever the order of the detector's output."""
    found = {
        "boxes": torch.tensor([[5.0, 0, 9, 9], [2, 3, 9, 9], [2, 1, 9, 9], [0, 0, 9, 9], [7, 7, 9, 9]]),
        "labels": torch.tensor([1, 1, 1, 2, 3]),
        "scores": torch.tensor([0.5, 0.5, 0.5, 0.5, 0.9]),
    }
    for order in ([0, 1, 2, 3, 4], [3, 2, 4, 0, 1]):
        ordered = from_detector({name: value[order] for name, value in found.items()})
        assert ordered.boxes[:, :2].tolist() == [[7, 7], [2, 1], [2, 3], [5, 0], [0, 0]]
        assert ordered.labels.tolist() == [2, 0, 0, 0, 1]
