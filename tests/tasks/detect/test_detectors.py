"""Properties of every detector, and equality with torchvision."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision.models import detection as reference
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

import visualtokens
from tests.tasks.detect.conftest import CLASSES, NOTHING, TWO, image, target
from visualtokens.bench import count_macs
from visualtokens.errors import UserError
from visualtokens.tasks.detect import create
from visualtokens.tasks.detect.detectors import FitImages, PyramidBackbone
from visualtokens.tasks.detect.models import DETECTORS
from visualtokens.tasks.timm_models import Backbone

every_detector = pytest.mark.parametrize("name", DETECTORS)


@every_detector
def test_training_gives_losses_and_gradients_everywhere(small: Callable[..., Any], name: str) -> None:
    model = small(name).train()
    losses = model([image(), image(48, 80, seed=1)], [TWO, target([[3.0, 4.0, 40.0, 44.0]], [2], (48, 80))])
    assert all(loss.shape == () and math.isfinite(loss.item()) for loss in losses.values())
    sum(losses.values()).backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert missing == []


@every_detector
def test_training_on_images_without_objects(small: Callable[..., Any], name: str) -> None:
    """Every parameter gets a gradient, which DistributedDataParallel requires."""
    for targets in ([NOTHING, NOTHING], [TWO, NOTHING]):
        model = small(name).train()
        losses = model([image(), image(seed=1)], targets)
        total = sum(losses.values())
        assert math.isfinite(total.item())
        total.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@every_detector
@pytest.mark.parametrize("size", [(64, 64), (1, 1), (2000, 3)])
def test_detections_are_in_pixels_of_the_image(
    small: Callable[..., Any], name: str, size: tuple[int, int]
) -> None:
    model = small(name).eval()
    keep_all_detections(model)
    with torch.inference_mode():
        found = model([image(*size)])[0]
    n = len(found["labels"])
    assert 0 < n <= 100
    assert found["boxes"].shape == (n, 4)
    left, top, right, bottom = found["boxes"].unbind(1)
    slack = 1e-3 * max(size)
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (right <= size[1] + slack).all()
    assert (bottom <= size[0] + slack).all()
    assert ((found["labels"] >= 1) & (found["labels"] <= CLASSES)).all()
    assert ((found["scores"] > 0) & (found["scores"] <= 1)).all()
    if model.has_masks:
        assert (found["masks"].shape, found["masks"].dtype) == ((n, *size), torch.bool)
    else:
        assert "masks" not in found


def keep_all_detections(model: Any) -> None:
    """Remove the score threshold, which untrained weights do not reach."""
    if hasattr(model, "roi_heads"):
        for heads in getattr(model.roi_heads, "stages", [model.roi_heads]):
            heads.score_thresh = 0.0
    else:
        model.score_thresh = 0.0
        torch.nn.init.normal_(model.head.classification_head.cls_logits.weight, std=0.1)


@every_detector
def test_images_of_a_batch_are_independent(small: Callable[..., Any], name: str) -> None:
    """The same detections alone and in a batch, in any order.

    Kernels for one and for two images round differently, so detections of nearly equal score may swap.
    """
    model = small(name, backbone="resnet18").eval()
    keep_all_detections(model)
    if name == "retinanet":  # which of its near-duplicates survive may depend on the last digit of a score
        model.nms_thresh, model.topk_candidates, model.detections_per_img = 1.0, 10**6, 10**6
    with torch.inference_mode():
        alone = model([image(64, 64)])[0]
        beside = model([image(64, 64), image(64, 64, seed=1)])[0]
    assert len(alone["labels"]) == len(beside["labels"]) > 0
    same = (alone["labels"][:, None] == beside["labels"]) & torch.isclose(
        alone["scores"][:, None], beside["scores"], atol=1e-5
    )  # (n, n)
    same &= torch.isclose(alone["boxes"][:, None], beside["boxes"], atol=1e-2).all(2)
    assert same.any(1).all()
    assert same.any(0).all()


@pytest.mark.parametrize("name", ["faster_rcnn", "mask_rcnn"])
def test_region_detectors_equal_torchvision(small: Callable[..., Any], name: str) -> None:
    model = small(name, width=256, hidden=1024, regions=512, backbone="resnet18").eval()
    anchors = AnchorGenerator(((32,), (64,), (128,), (256,), (512,)), ((0.5, 1.0, 2.0),) * 5)
    backbone = model.backbone
    names = ["4", "8", "16", "32"]
    pools = [MultiScaleRoIAlign(names, side, 2) for side in (7, 14)]
    masks = name == "mask_rcnn"
    theirs = (reference.MaskRCNN if masks else reference.FasterRCNN)(
        backbone,
        CLASSES + 1,
        rpn_anchor_generator=anchors,
        box_roi_pool=pools[0],
        **({"mask_roi_pool": pools[1]} if masks else {}),
        min_size=64,
        max_size=96,
        box_score_thresh=0.0,
    ).eval()
    theirs.load_state_dict(model.state_dict())
    keep_all_detections(model)
    with torch.inference_mode():
        ours, expected = model([image(64, 96)])[0], theirs([image(64, 96)])[0]
    # the same modules on the same inputs: only the order of detections of equal score could differ
    torch.testing.assert_close(ours["boxes"], expected["boxes"], rtol=1e-4, atol=1e-3)
    assert torch.equal(ours["labels"], expected["labels"])
    torch.testing.assert_close(ours["scores"], expected["scores"], rtol=1e-4, atol=1e-6)
    assert ours.keys() == expected.keys()
    if masks:  # pixels at the threshold may differ
        assert (ours["masks"] != (expected["masks"][:, 0] > 0.5)).float().mean() < 1e-4


def test_retinanet_equals_torchvision(small: Callable[..., Any]) -> None:
    model = small("retinanet", width=256, backbone="resnet18").eval()
    theirs = reference.RetinaNet(
        model.backbone, CLASSES, min_size=64, max_size=96, score_thresh=0.0, detections_per_img=100
    ).eval()
    keep_all_detections(model)
    theirs.load_state_dict(model.state_dict())
    assert (
        theirs.anchor_generator.num_anchors_per_location()
        == model.anchor_generator.num_anchors_per_location()
    )
    theirs.anchor_generator = model.anchor_generator  # torchvision rounds the sizes to whole pixels
    with torch.inference_mode():
        ours, expected = model([image(64, 96)])[0], theirs([image(64, 96)])[0]
    torch.testing.assert_close(ours["boxes"], expected["boxes"], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(ours["scores"], expected["scores"], rtol=1e-4, atol=1e-6)
    assert torch.equal(ours["labels"], expected["labels"] + 1)  # 0 is the background, which it does not learn
    target = {"boxes": TWO["boxes"], "labels": TWO["labels"] - 1}
    ours, expected = model.train()([image()], [TWO]), theirs.train()([image()], [target])
    assert ours.keys() == expected.keys()
    assert all(torch.allclose(ours[name], expected[name]) for name in ours)


seen: list[dict[str, tuple[int, ...]]] = []


class Shapes(nn.Module):
    """Records the shapes of the levels in a global list, because counting runs a copy."""

    def __init__(self, pyramid: PyramidBackbone) -> None:
        super().__init__()
        self.pyramid = pyramid

    def forward(self, images: Tensor) -> None:
        seen.append({name: tuple(level.shape) for name, level in self.pyramid(images).items()})


FAMILIES = (
    "vt_resnet18",
    "paca_vit_b0",
    "paca_vit_nano",
    "stvit_small",
    "stvit_iso_64",
    "deit_e252",
    "pvt_v2_b0_32",
)


@pytest.mark.parametrize(
    "name",
    [n if n in FAMILIES else pytest.param(n, marks=pytest.mark.slow) for n in visualtokens.list_models()],
)
def test_our_backbones_give_a_pyramid(name: str) -> None:
    with torch.device("meta"):
        pyramid = PyramidBackbone(Backbone(name), width=8)
    count_macs(Shapes(pyramid), (64, 128))  # runs on shapes alone, without arithmetic
    strides = pyramid.strides
    assert (strides[0], strides[-1]) == (16 if name.startswith("deit") else 4, 64)
    assert all(coarser == 2 * finer for finer, coarser in itertools.pairwise(strides))
    assert seen[-1] == {str(s): (1, 8, 64 // s, 128 // s) for s in strides}


@pytest.mark.parametrize(
    ("name", "options", "finest"),
    [
        ("resnet18", {}, 4),
        ("convnext_atto", {}, 4),
        ("mobilenetv3_small_050", {}, 4),
        ("pvt_v2_b0", {}, 4),
        ("swin_tiny_patch4_window7_224", {"img_size": (64, 96), "window_size": 2}, 4),
        ("vit_tiny_patch16_224", {"dynamic_img_size": True}, 16),
    ],
)
def test_timm_backbones(name: str, options: dict[str, Any], finest: int) -> None:
    with torch.device("meta"):
        pyramid = PyramidBackbone(Backbone(name, options=options), width=8)
        shapes = [tuple(x.shape) for x in pyramid(torch.empty(1, 3, 64, 96)).values()]
    assert pyramid.strides[0] == finest
    assert shapes == [(1, 8, math.ceil(64 / s), math.ceil(96 / s)) for s in pyramid.strides]


def test_strides_that_do_not_double_are_refused() -> None:
    with (
        torch.device("meta"),
        pytest.raises(UserError, match=r"stride doubles, the backbone's have \(4, 16\)"),
    ):
        PyramidBackbone(Backbone("resnet18", out_indices=(1, 3)))


def test_retinanet_starts_at_stride_8(small: Callable[..., Any]) -> None:
    model = small("retinanet", backbone="paca_vit_b0")
    assert model.backbone.strides == (8, 16, 32, 64, 128)
    assert [round(size) for sizes in model.anchor_generator.sizes for size in sizes[:1]] == [
        32,
        64,
        128,
        256,
        512,
    ]
    assert small("retinanet", backbone="paca_vit_b0_32").backbone.strides == (
        4,
        8,
        16,
    )  # it has nothing coarser


def test_anchors_follow_the_strides(small: Callable[..., Any]) -> None:
    model = small("mask_rcnn", backbone="paca_vit_b0")
    assert model.rpn.anchor_generator.sizes == ((32,), (64,), (128,), (256,), (512,))
    assert model.roi_heads.box_roi_pool.scales == [1 / 4, 1 / 8, 1 / 16, 1 / 32]


@every_detector
def test_no_weight_decay_names(small: Callable[..., Any], name: str) -> None:
    model = small(name, backbone="vit_tiny_patch16_224", backbone_args={"dynamic_img_size": True})
    spared, parameters = model.no_weight_decay(), dict(model.named_parameters())
    tables = [n for n in parameters if n.endswith("pos_embed")]
    assert len(tables) == 1
    assert set(tables) <= spared
    groups = timm.optim.param_groups_weight_decay(model, 0.05, no_weight_decay_list=spared)
    without = {id(p) for group in groups if not group["weight_decay"] for p in group["params"]}
    assert all(id(parameters[n]) in without for n in tables)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(detector="mask_rcn"), "unknown detector 'mask_rcn'; did you mean 'mask_rcnn'"),
        (dict(backbone="paca_vit_b9"), "unknown backbone 'paca_vit_b9'; did you mean"),
        (dict(classes=0), "classes=0 must be at least 1"),
        (dict(short=0), "short=0 must be at least 1"),
        (dict(short=100, long=90), "long=90 is less than short=100"),
        (dict(width=0), "width=0 must be at least 1"),
        (dict(backbone_args={"features_only": False}), "backbone_args may not hold 'features_only'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        create(**{"detector": "mask_rcnn", "backbone": "paca_vit_nano", "classes": 3, **options})
    assert message in str(caught.value)


# Input and output transforms.

MEAN, STD = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)


def fit_images(short: int = 64, long: int = 96) -> FitImages:
    return FitImages(short=short, long=long, mean=MEAN, std=STD)


def test_training_images_are_not_resized() -> None:
    seen, targets = fit_images().train()([image(40, 70)], [TWO])
    assert seen.image_sizes == [(40, 70)]
    assert seen.tensors.shape == (1, 3, 64, 96)
    assert targets[0]["boxes"] is TWO["boxes"]
    normalised = (image(40, 70) - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    assert torch.allclose(seen.tensors[0, :, :40, :70], normalised, atol=1e-6)
    assert not seen.tensors[0, :, 40:].any()
    assert not seen.tensors[0, :, :, 70:].any()


@pytest.mark.parametrize(
    ("size", "expected"),
    [((32, 40), (64, 80)), ((200, 100), (96, 48)), ((1, 2000), (1, 96)), ((1, 1), (64, 64))],
)
def test_eval_images_are_resized(size: tuple[int, int], expected: tuple[int, int]) -> None:
    seen, _ = fit_images().eval()([image(*size)])
    assert seen.image_sizes == [expected]
    assert all(side % 32 == 0 for side in seen.tensors.shape[2:])


def test_detections_return_to_the_original_size() -> None:
    found = [{"boxes": torch.tensor([[10.0, 20, 30, 40]]), "masks": torch.ones(1, 1, 28, 28)}]
    result = fit_images().eval().postprocess(found, [(64, 80)], [(32, 40)])[0]
    assert result["boxes"].tolist() == [[5, 10, 15, 20]]
    assert (result["masks"].shape, result["masks"].dtype) == ((1, 32, 40), torch.bool)
    rows, columns = torch.where(result["masks"][0])
    edges = torch.tensor([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    assert (edges - result["boxes"][0]).abs().max() <= 1


def test_mask_is_pasted_into_its_box() -> None:
    half = torch.zeros(1, 1, 28, 28)
    half[..., 14:] = 1
    found = [{"boxes": torch.tensor([[0.0, 0, 40, 40]]), "masks": half}]
    mask = fit_images().eval().postprocess(found, [(64, 64)], [(64, 64)])[0]["masks"][0]
    assert not mask[:, :18].any()
    assert mask[2:38, 22:38].all()
    assert not mask[42:].any()


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="short=90, long=80"):
        fit_images(90, 80)
