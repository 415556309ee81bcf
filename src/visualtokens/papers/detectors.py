"""Mask R-CNN as the tables of PaCa-ViT count it.

What multiplies of the detector on one image of 1280×800: backbone, pyramid and region proposals; the box head
for 1000 regions and the mask head for 100, the most there can be. Biases of convolutions count as well.
"""

from __future__ import annotations

from torch import Tensor, nn

from visualtokens.bench import macs_by_module
from visualtokens.tasks.detect import create
from visualtokens.tasks.detect.detectors import BOX_SIDE, MASK_SIDE, MaskRCNN

SIZE = (800, 1280)
COCO_CLASSES = 80
BOX_REGIONS, MASK_REGIONS = 1000, 100


class FixedRegions(nn.Module):
    """The layers of a Mask R-CNN in the order they run, for a number of regions that no image decides."""

    def __init__(self, detector: MaskRCNN) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor) -> None:
        heads, width = self.detector.roi_heads, self.detector.backbone.out_channels
        levels = self.detector.backbone(images)
        self.detector.rpn.head(list(levels.values()))
        heads.box_predictor(heads.box_head(images.new_empty(BOX_REGIONS, width, BOX_SIDE, BOX_SIDE)))
        heads.mask_predictor(heads.mask_head(images.new_empty(MASK_REGIONS, width, MASK_SIDE, MASK_SIDE)))


def mask_rcnn(backbone: str) -> FixedRegions:
    """Mask R-CNN for COCO, to be counted."""
    detector = create("mask_rcnn", backbone=backbone, classes=COCO_CLASSES)
    return FixedRegions(detector)


def macs_and_biases(model: nn.Module, size: tuple[int, int]) -> int:
    """Multiply-adds on one image, and one addition for every output of a convolution that has a bias."""
    counts = macs_by_module(model, size, depth=None)
    biases = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d) and module.bias is not None:
            biases += counts.get(name, 0) // _macs_per_output(module)
    return counts[""] + biases


def _macs_per_output(convolution: nn.Conv2d | nn.ConvTranspose2d) -> int:
    if isinstance(convolution, nn.Conv2d):
        return convolution.weight[0].numel()
    if convolution.kernel_size != convolution.stride:
        raise NotImplementedError("overlapping transposed convolutions: their outputs differ in cost")
    return convolution.in_channels // convolution.groups
