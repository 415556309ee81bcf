"""Cascade Mask R-CNN: three region heads, each of which refines the boxes of the previous one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_inference, maskrcnn_loss
from torchvision.ops import clip_boxes_to_image, remove_small_boxes

from visualtokens.tasks.detect.detectors import (
    Detection,
    DetectorOptions,
    PyramidBackbone,
    fit_images,
    proposals,
    region_heads,
)
from visualtokens.tasks.timm_models import Backbone, Matcher, matcher_under

IOUS = (0.5, 0.6, 0.7)  # positive regions of each stage
BOX_WEIGHTS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
LOSS_WEIGHTS = (1.0, 0.5, 0.25)
MIN_BOX_SIDE = 1e-2  # smaller boxes are not passed to the next training stage

Size = tuple[int, int]
Levels = Mapping[str, Tensor]


class CascadeMaskRCNN(GeneralizedRCNN):
    """Mask R-CNN with three region heads in a row, at increasing IoU thresholds."""

    has_masks = True

    def __init__(self, body: Backbone, options: DetectorOptions) -> None:
        backbone = PyramidBackbone(body, width=options.width)
        heads = CascadeHeads(backbone, options)
        super().__init__(backbone, proposals(backbone, options), heads, fit_images(backbone, options))

    def group_matcher(self, coarse: bool = False) -> Matcher:
        return matcher_under("backbone.body.", self.backbone.body.group_matcher(coarse))

    def no_weight_decay(self) -> set[str]:
        return self.backbone.no_weight_decay("backbone.")


class CascadeHeads(nn.Module):
    """Three of torchvision's region heads in a row, with class-agnostic boxes.

    In training every stage samples regions from the boxes of the previous stage. In evaluation class
    probabilities are the mean over the stages, boxes are those of the last stage, and masks the mean over
    the stages on these boxes.
    """

    def __init__(self, backbone: PyramidBackbone, options: DetectorOptions) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        for iou, weights in zip(IOUS, BOX_WEIGHTS, strict=True):
            stage = region_heads(backbone, options, iou=iou, box_weights=weights)
            stage.box_predictor.bbox_pred = nn.Linear(options.hidden, 4)
            self.stages.append(stage)

    def forward(
        self,
        features: Levels,
        proposals: list[Tensor],
        image_shapes: list[Size],
        targets: list[Detection] | None = None,
    ) -> tuple[list[Detection], dict[str, Tensor]]:
        """Return detections and losses like torchvision's ``RoIHeads``; one of them is empty."""
        if self.training:
            return [], self._losses(features, proposals, image_shapes, targets)
        return self._detect(features, proposals, image_shapes), {}

    @property
    def _heads(self) -> list[RoIHeads]:
        return list(self.stages)

    def _losses(
        self, features: Levels, regions: list[Tensor], sizes: list[Size], targets: list[Detection] | None
    ) -> dict[str, Tensor]:
        losses = {}
        for number, (stage, weight) in enumerate(zip(self._heads, LOSS_WEIGHTS, strict=True), start=1):
            regions, matched, labels, wanted = stage.select_training_samples(regions, targets)
            logits, offsets = _predict(stage, features, regions, sizes)
            label_loss, box_loss = fastrcnn_loss(logits, _for_every_class(offsets, logits), labels, wanted)
            mask_loss = _mask_loss(stage, features, regions, sizes, matched, labels, targets or [])
            for name, loss in (("classifier", label_loss), ("box_reg", box_loss), ("mask", mask_loss)):
                losses[f"loss_{name}_{number}"] = weight * loss
            regions = [
                box[remove_small_boxes(box, MIN_BOX_SIDE)] for box in _refine(stage, offsets, regions, sizes)
            ]
        return losses

    def _detect(self, features: Levels, regions: list[Tensor], sizes: list[Size]) -> list[Detection]:
        probabilities = []
        for stage in self._heads:
            seen = regions
            logits, offsets = _predict(stage, features, seen, sizes)
            probabilities.append(logits.softmax(1))
            regions = _refine(stage, offsets, seen, sizes)
        mean = torch.stack(probabilities).mean(0)  # (regions, classes + 1)
        # `postprocess_detections` takes logits, and the softmax of log p is p
        boxes, scores, labels = stage.postprocess_detections(
            mean.log(), _for_every_class(offsets, logits), seen, sizes
        )
        masks = self._masks(features, boxes, sizes, labels)
        names = ("boxes", "scores", "labels", "masks")
        return [
            dict(zip(names, each, strict=True)) for each in zip(boxes, scores, labels, masks, strict=True)
        ]

    def _masks(
        self, features: Levels, boxes: list[Tensor], sizes: list[Size], labels: list[Tensor]
    ) -> list[Tensor]:
        """Return the mean mask probabilities of the stages: ``(n, 1, 28, 28)`` per image."""
        pooled = self._heads[0].mask_roi_pool(features, boxes, sizes)  # no parameters: the same in all stages
        logits = (stage.mask_predictor(stage.mask_head(pooled)) for stage in self._heads)
        found = [maskrcnn_inference(each, labels) for each in logits]
        return [torch.stack(masks).mean(0) for masks in zip(*found, strict=True)]


def _predict(
    stage: RoIHeads, features: Levels, regions: list[Tensor], sizes: list[Size]
) -> tuple[Tensor, Tensor]:
    """Return logits ``(regions, classes + 1)`` and box offsets ``(regions, 4)``."""
    return stage.box_predictor(stage.box_head(stage.box_roi_pool(features, regions, sizes)))


def _for_every_class(offsets: Tensor, logits: Tensor) -> Tensor:
    """Repeat ``(regions, 4)`` to ``(regions, 4 · (classes + 1))``: torchvision expects a box per class."""
    return offsets.repeat(1, logits.shape[1])


def _refine(stage: RoIHeads, offsets: Tensor, regions: list[Tensor], sizes: list[Size]) -> list[Tensor]:
    """Return the refined boxes, clipped to the image and detached like the proposals of Mask R-CNN."""
    moved = stage.box_coder.decode(offsets.detach(), regions)[:, 0]  # (regions, 4)
    parts = moved.split([len(each) for each in regions])
    return [clip_boxes_to_image(part, size) for part, size in zip(parts, sizes, strict=True)]


def _mask_loss(
    stage: RoIHeads,
    features: Levels,
    regions: list[Tensor],
    sizes: list[Size],
    matched: list[Tensor],
    labels: list[Tensor],
    targets: list[Detection],
) -> Tensor:
    """Return the mask loss of the positive regions."""
    positive = [each > 0 for each in labels]
    objects = [each[which] for each, which in zip(regions, positive, strict=True)]
    matched = [each[which] for each, which in zip(matched, positive, strict=True)]
    logits = stage.mask_predictor(stage.mask_head(stage.mask_roi_pool(features, objects, sizes)))
    masks, classes = [t["masks"] for t in targets], [t["labels"] for t in targets]
    return maskrcnn_loss(logits, objects, masks, classes, matched)
