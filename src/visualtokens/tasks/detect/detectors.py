"""Faster and Mask R-CNN and RetinaNet from torchvision's parts on any timm backbone."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import retinanet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, paste_masks_in_image
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform, resize_boxes
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, FeaturePyramidNetwork, LastLevelP6P7
from torchvision.ops.poolers import LevelMapper
from torchvision.transforms.v2 import functional

from visualtokens.data.detection import fit
from visualtokens.errors import UserError
from visualtokens.tasks.timm_models import Backbone, Matcher, matcher_under, preprocess_for

Detection = dict[str, Tensor]  # the detections or the targets of one image


@dataclass(frozen=True, kw_only=True)
class DetectorOptions:
    """Sizes of a detector. The defaults are those usual for COCO; smaller ones suit smaller images."""

    classes: int
    short: int = 800  # short side of the input, unless the long side would exceed ``long``
    long: int = 1333
    width: int = 256  # channels of the pyramid and of the heads' convolutions
    hidden: int = 1024  # of the box head
    regions: int = 512  # sampled per training image; four times as many are proposed

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise UserError(f"{field.name}={getattr(self, field.name)} must be at least 1")
        if self.long < self.short:
            raise UserError(f"long={self.long} is less than short={self.short}")


# Parts of Faster, Mask and Cascade Mask R-CNN.

ASPECTS = (0.5, 1.0, 2.0)  # height to width of the anchors
ANCHOR = 8  # side of an anchor in strides of its level: 32 pixels at stride 4
BOX_SIDE, MASK_SIDE = 7, 14  # of the pooled features of a region
MIN_SCORE = 0.05  # detections below are dropped
NMS = 0.5
MAX_DETECTIONS = 100


def fit_images(backbone: PyramidBackbone, options: DetectorOptions) -> FitImages:
    """Return the input transform of the backbone."""
    own = preprocess_for(backbone.body)
    return FitImages(short=options.short, long=options.long, mean=own.mean, std=own.std)


def proposals(backbone: PyramidBackbone, options: DetectorOptions) -> RegionProposalNetwork:
    """Return the region proposal network: three anchors of one size at every position of every level.

    It proposes four times the sampled regions, at most 2000 in training and 1000 in evaluation, as for COCO.
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
    masks: bool = True,
) -> RoIHeads:
    """Return the heads that predict the class, the box and, with ``masks``, the mask of a region.

    Regions with at least this ``iou`` are positive. ``box_weights`` scale the four box regression targets.
    """
    width, labels = options.width, options.classes + 1  # 0 is the background
    heads = RoIHeads(
        region_pool(backbone, BOX_SIDE),
        TwoMLPHead(width * BOX_SIDE**2, options.hidden),
        FastRCNNPredictor(options.hidden, labels),
        fg_iou_thresh=iou,
        bg_iou_thresh=iou,
        batch_size_per_image=options.regions,
        positive_fraction=0.25,
        bbox_reg_weights=tuple(box_weights),
        score_thresh=MIN_SCORE,
        nms_thresh=NMS,
        detections_per_img=MAX_DETECTIONS,
    )
    if masks:
        heads.mask_roi_pool = region_pool(backbone, MASK_SIDE)
        heads.mask_head = MaskRCNNHeads(width, (width,) * 4, 1)
        heads.mask_predictor = MaskRCNNPredictor(width, width, labels)
    return heads


def region_pool(backbone: PyramidBackbone, side: int) -> MultiScaleRoIAlign:
    """Return RoIAlign from the level that suits the size of a region; the last level is for proposals only.

    torchvision would infer the strides from the first image, wrongly if that is very thin.
    """
    strides = backbone.strides[:-1]
    pool = MultiScaleRoIAlign([str(stride) for stride in strides], output_size=side, sampling_ratio=2)
    pool.scales = [1 / stride for stride in strides]
    pool.map_levels = LevelMapper(int(math.log2(strides[0])), int(math.log2(strides[-1])))
    return pool


class FasterRCNN(GeneralizedRCNN):
    """torchvision's Faster R-CNN on any backbone: Mask R-CNN without masks."""

    has_masks = False

    def __init__(self, body: Backbone, options: DetectorOptions) -> None:
        backbone = PyramidBackbone(body, width=options.width)
        heads = region_heads(backbone, options, masks=self.has_masks)
        super().__init__(backbone, proposals(backbone, options), heads, fit_images(backbone, options))

    def group_matcher(self, coarse: bool = False) -> Matcher:
        return matcher_under("backbone.body.", self.backbone.body.group_matcher(coarse))

    def no_weight_decay(self) -> set[str]:
        return self.backbone.no_weight_decay("backbone.")


class MaskRCNN(FasterRCNN):
    """torchvision's Mask R-CNN on any backbone."""

    has_masks = True


# RetinaNet: boxes directly from the levels of the pyramid, without regions and masks.

RETINANET_ANCHOR = 4  # side of the smallest anchor in strides of its level: 32 pixels at stride 8
FINEST = 8


class RetinaNet(retinanet.RetinaNet):
    """torchvision's RetinaNet on any backbone, with nine anchors at every position.

    It has no background output, which torchvision's has but never uses; labels still count from 1.
    """

    has_masks = False

    def __init__(self, body: Backbone, options: DetectorOptions) -> None:
        backbone = PyramidBackbone(body, width=options.width, finest=FINEST, convolved=True)
        sizes = tuple(
            tuple(RETINANET_ANCHOR * stride * 2 ** (i / 3) for i in range(3)) for stride in backbone.strides
        )
        super().__init__(
            backbone,
            options.classes,
            anchor_generator=AnchorGenerator(sizes, (ASPECTS,) * len(sizes)),
            score_thresh=MIN_SCORE,
            nms_thresh=NMS,
            detections_per_img=MAX_DETECTIONS,
        )
        self.transform = fit_images(backbone, options)

    def compute_loss(
        self, targets: list[Detection], head_outputs: dict[str, Tensor], anchors: list[Tensor]
    ) -> dict[str, Tensor]:
        shifted = [target | {"labels": target["labels"] - 1} for target in targets]
        return super().compute_loss(shifted, head_outputs, anchors)

    def postprocess_detections(
        self,
        head_outputs: dict[str, list[Tensor]],
        anchors: list[list[Tensor]],
        image_shapes: list[tuple[int, int]],
    ) -> list[Detection]:
        found = super().postprocess_detections(head_outputs, anchors, image_shapes)
        return [each | {"labels": each["labels"] + 1} for each in found]

    def group_matcher(self, coarse: bool = False) -> Matcher:
        return matcher_under("backbone.body.", self.backbone.body.group_matcher(coarse))

    def no_weight_decay(self) -> set[str]:
        return self.backbone.no_weight_decay("backbone.")


# Input and output transforms.

THRESHOLD = 0.5  # of a mask's probability
DIVISOR = 32  # the sides of a batch are padded to multiples of it


class FitImages(GeneralizedRCNNTransform):
    """Normalises, resizes and pads images; maps boxes and masks back to the original size.

    In training mode images are not resized, because augmentation resizes them with their objects
    (``data.detection.Sizing``). In eval mode the short side becomes ``short``, unless the long one would
    exceed ``long``.
    """

    def __init__(self, *, short: int, long: int, mean: Sequence[float], std: Sequence[float]) -> None:
        if not 1 <= short <= long:
            raise UserError(f"short={short}, long={long}: give sides in pixels, the short one first")
        super().__init__(short, long, list(mean), list(std), size_divisible=DIVISOR)

    def resize(self, image: Tensor, target: Detection | None = None) -> tuple[Tensor, Detection | None]:
        if self.training:
            return image, target
        size = fit((image.shape[1], image.shape[2]), short=self.min_size[0], long=self.max_size)
        return functional.resize(image, list(size), antialias=True), target

    def postprocess(
        self,
        result: list[Detection],
        image_shapes: list[tuple[int, int]],
        original_image_sizes: list[tuple[int, int]],
    ) -> list[Detection]:
        """Return boxes ``(n, 4)`` and masks ``(n, H, W)`` bool in pixels of the original image."""
        if self.training:
            return result
        for found, seen, original in zip(result, image_shapes, original_image_sizes, strict=True):
            found["boxes"] = resize_boxes(found["boxes"], seen, original)
            if "masks" in found:
                found["masks"] = _paste(found["masks"], found["boxes"], original)
        return result


def _paste(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Paste probabilities ``(n, 1, 28, 28)`` into their boxes; return masks ``(n, H, W)`` bool.

    One at a time: a hundred float masks of a large photograph would take gigabytes.
    """
    pasted = torch.zeros(len(masks), *size, dtype=torch.bool, device=masks.device)
    for i in range(len(masks)):
        pasted[i] = paste_masks_in_image(masks[i : i + 1], boxes[i : i + 1], size)[0, 0] > THRESHOLD
    return pasted


# The feature pyramid on a timm backbone.

COARSEST = 64  # stride of the last level; coarser levels than the backbone's are pooled


class PyramidBackbone(nn.Module):
    """Images to the levels of a feature pyramid, finest first, of ``strides`` and ``width`` channels.

    Of several maps with the same stride the deepest is used; maps finer than ``finest`` are not. Missing
    levels up to stride 64 are pooled from the coarsest one, like the fifth level of Mask R-CNN;
    ``convolved`` adds two levels by convolution instead, as RetinaNet does.
    """

    def __init__(self, body: Backbone, *, width: int = 256, finest: int = 4, convolved: bool = False) -> None:
        super().__init__()
        self.body = body
        self.out_channels = width  # torchvision's detectors read it
        deepest = {stride: i for i, stride in enumerate(body.strides)}  # the last of a stride wins
        usable = [s for s in deepest if s >= finest] or [max(deepest)]
        _check_strides(usable)
        self._levels = {str(stride): deepest[stride] for stride in usable}
        channels = [body.channels[i] for i in self._levels.values()]
        extra: ExtraFPNBlock
        if convolved:
            more = [2 * usable[-1], 4 * usable[-1]]
            extra = LastLevelP6P7(width, width)
        else:
            more = [s for s in (8, 16, 32, COARSEST) if s > usable[-1]]
            extra = _Pooled(more)
        self.strides = (*usable, *more)
        self.fpn = FeaturePyramidNetwork(channels, width, extra)

    def no_weight_decay(self, prefix: str = "") -> set[str]:
        """Return the names, after ``prefix``, of parameters that the backbone exempts from weight decay."""
        return {f"{prefix}body.{name}" for name in self.body.no_weight_decay()}

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        maps = self.body(images)
        return self.fpn(OrderedDict((name, maps[i]) for name, i in self._levels.items()))


def _check_strides(strides: Sequence[int]) -> None:
    for finer, coarser in itertools.pairwise(strides):
        if coarser != 2 * finer:
            raise UserError(
                f"a pyramid needs maps whose stride doubles, the backbone's have {tuple(strides)}; "
                "choose others with out_indices"
            )


class _Pooled(ExtraFPNBlock):
    """Adds a level for each stride: every second position of the level before."""

    def __init__(self, strides: Sequence[int]) -> None:
        super().__init__()
        self.strides = tuple(strides)

    def forward(
        self, results: list[Tensor], x: list[Tensor], names: list[str]
    ) -> tuple[list[Tensor], list[str]]:
        for stride in self.strides:
            results.append(F.max_pool2d(results[-1], kernel_size=1, stride=2))
            names.append(str(stride))
        return results, names
