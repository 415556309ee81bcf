"""RetinaNet: boxes straight from the levels of the pyramid, no regions and no masks."""

from __future__ import annotations

from torch import Tensor
from torchvision.models.detection import retinanet
from torchvision.models.detection.anchor_utils import AnchorGenerator

from visualtokens.tasks.detect.backbone import PyramidBackbone
from visualtokens.tasks.detect.images import Detection
from visualtokens.tasks.detect.options import DetectorOptions
from visualtokens.tasks.detect.parts import ASPECTS, MOST_DETECTIONS, NMS, SCORE, fit_images
from visualtokens.tasks.segment.backbone import Backbone

ANCHOR = 4  # side of the smallest anchor in strides of its level: 32 pixels at stride 8
FINEST = 8


class RetinaNet(retinanet.RetinaNet):
    """torchvision's RetinaNet on any backbone, with nine anchors at every position.

    It has no output for the background, which torchvision leaves unused; labels count from 1 all the same.
    """

    has_masks = False

    def __init__(self, body: Backbone, options: DetectorOptions) -> None:
        backbone = PyramidBackbone(body, width=options.width, finest=FINEST, convolved=True)
        sizes = tuple(tuple(ANCHOR * stride * 2 ** (i / 3) for i in range(3)) for stride in backbone.strides)
        super().__init__(
            backbone,
            options.classes,
            anchor_generator=AnchorGenerator(sizes, (ASPECTS,) * len(sizes)),
            score_thresh=SCORE,
            nms_thresh=NMS,
            detections_per_img=MOST_DETECTIONS,
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

    def no_weight_decay(self) -> set[str]:
        return self.backbone.no_weight_decay("backbone.")
