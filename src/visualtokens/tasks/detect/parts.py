"""The parts that Mask R-CNN and Cascade Mask R-CNN share, all of them torchvision's."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import LevelMapper

from visualtokens.tasks.detect.backbone import PyramidBackbone
from visualtokens.tasks.detect.images import FitImages
from visualtokens.tasks.detect.options import DetectorOptions

ASPECTS = (0.5, 1.0, 2.0)  # height to width of the anchors
ANCHOR = 8  # side of an anchor in strides of its level: 32 pixels at stride 4
BOX_SIDE, MASK_SIDE = 7, 14  # of what is pooled from a region
SCORE = 0.05  # detections below are left out
NMS = 0.5
MOST_DETECTIONS = 100


def fit_images(backbone: PyramidBackbone, options: DetectorOptions) -> FitImages:
    """Images as the backbone expects them."""
    cfg = backbone.body.pretrained_cfg
    return FitImages(short=options.short, long=options.long, mean=cfg["mean"], std=cfg["std"])


def proposals(backbone: PyramidBackbone, options: DetectorOptions) -> RegionProposalNetwork:
    """Where objects might be: three anchors of one size at every position of every level.

    Four times as many regions as are learned from, at most COCO's 2000, and 1000 to detect.
    """
    training, testing = min(2000, 4 * options.regions), min(1000, 4 * options.regions)
    sizes = tuple((ANCHOR * stride,) for stride in backbone.strides)
    anchors = AnchorGenerator(sizes, (ASPECTS,) * len(sizes))
    return RegionProposalNetwork(
        anchors,
        RPNHead(backbone.out_channels, len(ASPECTS)),
        fg_iou_thresh=0.7,
        bg_iou_thresh=0.3,
        batch_size_per_image=256,
        positive_fraction=0.5,
        pre_nms_top_n=dict(training=training, testing=testing),
        post_nms_top_n=dict(training=training, testing=testing),
        nms_thresh=0.7,
    )


def region_heads(
    backbone: PyramidBackbone,
    options: DetectorOptions,
    *,
    iou: float = 0.5,
    box_weights: Sequence[float] = (10.0, 10.0, 5.0, 5.0),
) -> RoIHeads:
    """What is in a region: its class, its box, its mask. A region is an object from this ``iou`` on.

    ``box_weights`` scale the four numbers of a box that are learned.
    """
    width, labels = options.width, options.classes + 1  # 0 is the background
    return RoIHeads(
        region_pool(backbone, BOX_SIDE),
        TwoMLPHead(width * BOX_SIDE**2, options.hidden),
        FastRCNNPredictor(options.hidden, labels),
        fg_iou_thresh=iou,
        bg_iou_thresh=iou,
        batch_size_per_image=options.regions,
        positive_fraction=0.25,
        bbox_reg_weights=tuple(box_weights),
        score_thresh=SCORE,
        nms_thresh=NMS,
        detections_per_img=MOST_DETECTIONS,
        mask_roi_pool=region_pool(backbone, MASK_SIDE),
        mask_head=MaskRCNNHeads(width, (width,) * 4, 1),
        mask_predictor=MaskRCNNPredictor(width, width, labels),
    )


def region_pool(backbone: PyramidBackbone, side: int) -> MultiScaleRoIAlign:
    """RoIAlign from the level that suits the size of a region; the last level is for proposals only.

    torchvision would infer the strides from the first image it sees, and wrongly if that is a thin one.
    """
    strides = backbone.strides[:-1]
    pool = MultiScaleRoIAlign([str(stride) for stride in strides], output_size=side, sampling_ratio=2)
    pool.scales = [1 / stride for stride in strides]
    pool.map_levels = LevelMapper(int(math.log2(strides[0])), int(math.log2(strides[-1])))
    return pool
