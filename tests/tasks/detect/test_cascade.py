"""The cascade against torchvision's single stage, in cases where both must agree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import RoIHeads

from tests.tasks.detect.conftest import CLASSES, TWO
from visualtokens.tasks.detect.cascade import BOX_WEIGHTS, IOUS, LOSS_WEIGHTS, CascadeHeads

SIZES = [(64, 64)]
REGIONS = [
    torch.tensor([[8.0, 10, 38, 52], [0, 0, 20, 20], [28, 4, 64, 33], [10, 20, 50, 64], [5, 30, 20, 60]])
]


def levels() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(3)
    return {str(s): torch.randn(1, 16, 64 // s, 64 // s, generator=rng) for s in (4, 8, 16, 32, 64)}


@pytest.fixture
def heads(small: Callable[..., Any]) -> CascadeHeads:
    """Three stages with the same weights that leave boxes where they are."""
    cascade = small("cascade_mask_rcnn", regions=4096).roi_heads  # more than there are: nothing is drawn
    for stage in cascade.stages:
        stage.load_state_dict(cascade.stages[0].state_dict())
        nn.init.zeros_(stage.box_predictor.bbox_pred.weight)
        nn.init.zeros_(stage.box_predictor.bbox_pred.bias)
        stage.score_thresh = 0.0
    return cascade


def single(cascade: CascadeHeads, stage: int) -> RoIHeads:
    """One stage as torchvision runs it, with a box for every class."""
    alone: Any = copy.deepcopy(cascade.stages[stage])
    agnostic = alone.box_predictor.bbox_pred
    alone.box_predictor.bbox_pred = nn.Linear(agnostic.in_features, 4 * (CLASSES + 1))
    with torch.no_grad():
        alone.box_predictor.bbox_pred.weight.copy_(agnostic.weight.repeat(CLASSES + 1, 1))
        alone.box_predictor.bbox_pred.bias.copy_(agnostic.bias.repeat(CLASSES + 1))
    return alone


def test_three_equal_stages_equal_one(heads: CascadeHeads) -> None:
    heads.eval()
    with torch.inference_mode():
        ours, _ = heads(levels(), REGIONS, SIZES)
        expected, _ = single(heads, 0).eval()(levels(), REGIONS, SIZES)
    assert len(ours[0]["labels"]) > 0
    for name in ("boxes", "labels", "scores", "masks"):
        assert torch.allclose(ours[0][name], expected[0][name], atol=1e-5), name


def test_scores_are_averaged_and_boxes_are_those_of_the_last_stage(heads: CascadeHeads) -> None:
    """By a loop over regions that pools, decodes and averages itself."""
    heads.eval()
    torch.manual_seed(1)
    for stage in heads.stages:
        nn.init.normal_(stage.box_predictor.bbox_pred.weight, std=0.5)
        nn.init.normal_(stage.box_predictor.cls_score.weight, std=0.5)
        stage.nms_thresh = 1.0  # keep all
        stage.detections_per_img = 1000
    with torch.inference_mode():
        found = heads(levels(), REGIONS, SIZES)[0][0]
        expected = []
        for region in REGIONS[0]:
            box, probabilities = region[None], []
            for stage, weights in zip(heads.stages, BOX_WEIGHTS, strict=True):
                logits, offsets = stage.box_predictor(
                    stage.box_head(stage.box_roi_pool(levels(), [box], SIZES))
                )
                probabilities.append(logits.softmax(1)[0])
                box = decode(box[0], offsets[0] / torch.tensor(weights))[None]
            for label in range(1, CLASSES + 1):
                expected.append((sum(p[label].item() for p in probabilities) / 3, *box[0].tolist()))
    result = sorted((s, *b) for s, b in zip(found["scores"].tolist(), found["boxes"].tolist(), strict=True))
    assert torch.allclose(torch.tensor(result), torch.tensor(sorted(expected)), atol=1e-3)


def decode(box: Tensor, offsets: Tensor) -> Tensor:
    """Faster R-CNN's: the centre moves by shares of the sides, the sides grow exponentially."""
    width, height = box[2] - box[0], box[3] - box[1]
    x, y = box[0] + width / 2 + offsets[0] * width, box[1] + height / 2 + offsets[1] * height
    width, height = width * offsets[2].exp(), height * offsets[3].exp()
    return torch.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2]).clamp(0, 64)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_losses_of_a_stage_equal_those_of_a_single_head(heads: CascadeHeads, number: int) -> None:
    """Regions stay in place, so stage n sees them with the true boxes added n times."""
    heads.train()
    _, losses = heads(levels(), [r.clone() for r in REGIONS], SIZES, [TWO])
    alone = single(heads, number).train()
    assert alone.proposal_matcher.high_threshold == alone.proposal_matcher.low_threshold == IOUS[number]
    seen = [torch.cat([REGIONS[0], *[TWO["boxes"]] * number])]
    _, expected = alone(levels(), seen, SIZES, [TWO])
    weight = LOSS_WEIGHTS[number]
    for name in ("classifier", "box_reg", "mask"):
        assert torch.allclose(
            losses[f"loss_{name}_{number + 1}"], weight * expected[f"loss_{name}"], atol=1e-5
        )


def test_later_stages_train_on_refined_boxes(heads: CascadeHeads) -> None:
    """Stage 1 moves everything far away: nothing but the true boxes is an object to stage 2."""
    heads.train()
    with torch.no_grad():
        heads.stages[0].box_predictor.bbox_pred.bias.copy_(torch.tensor([300.0, 300.0, 0.0, 0.0]))
    seen: list[list[Tensor]] = []
    second: Any = heads.stages[1]
    second.box_roi_pool.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1]))
    heads(levels(), [r.clone() for r in REGIONS], SIZES, [TWO])
    boxes = seen[0][0]
    true = [(box == TWO["boxes"]).all(1).any().item() for box in boxes]
    assert sum(true) == 2
    assert ((boxes[:, 2:] - boxes[:, :2]) > 0).all()


def test_no_gradient_flows_through_the_boxes(heads: CascadeHeads) -> None:
    heads.train()
    _, losses = heads(levels(), [r.clone() for r in REGIONS], SIZES, [TWO])
    losses["loss_classifier_3"].backward()
    first: Any = heads.stages[0]
    assert first.box_predictor.bbox_pred.weight.grad is None
