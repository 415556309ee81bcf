"""Mask R-CNN: propose regions, then tell the class, box and mask of each."""

from __future__ import annotations

from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN

from visualtokens.tasks.detect.backbone import PyramidBackbone
from visualtokens.tasks.detect.options import DetectorOptions
from visualtokens.tasks.detect.parts import fit_images, proposals, region_heads
from visualtokens.tasks.segment.backbone import Backbone


class MaskRCNN(GeneralizedRCNN):
    """torchvision's Mask R-CNN on any backbone."""

    has_masks = True

    def __init__(self, body: Backbone, options: DetectorOptions) -> None:
        backbone = PyramidBackbone(body, width=options.width)
        heads = region_heads(backbone, options)
        super().__init__(backbone, proposals(backbone, options), heads, fit_images(backbone, options))

    def no_weight_decay(self) -> set[str]:
        return self.backbone.no_weight_decay("backbone.")
