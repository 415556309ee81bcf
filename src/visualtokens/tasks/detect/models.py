"""Detectors by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from visualtokens.errors import UserError, unknown
from visualtokens.tasks.detect.cascade import CascadeMaskRCNN
from visualtokens.tasks.detect.detectors import DetectorOptions, FasterRCNN, MaskRCNN, RetinaNet
from visualtokens.tasks.timm_models import Backbone, check_model_args

Detector = FasterRCNN | CascadeMaskRCNN | RetinaNet  # MaskRCNN is a FasterRCNN

DETECTORS: Mapping[str, type[FasterRCNN] | type[CascadeMaskRCNN] | type[RetinaNet]] = {
    "faster_rcnn": FasterRCNN,
    "mask_rcnn": MaskRCNN,
    "cascade_mask_rcnn": CascadeMaskRCNN,
    "retinanet": RetinaNet,
}


def create(
    detector: str,
    *,
    backbone: str,
    classes: int,
    short: int = 800,
    long: int = 1333,
    width: int = 256,
    hidden: int = 1024,
    regions: int = 512,
    pretrained: bool = False,
    out_indices: Sequence[int] | None = None,
    backbone_args: Mapping[str, Any] | None = None,
) -> Detector:
    """Return a detector of ``classes`` classes with the interface of torchvision's detectors.

    >>> model = visualtokens.detect.create("mask_rcnn", backbone="paca_vit_b0", classes=80)
    >>> losses = model(images, targets)      # in training mode
    >>> found = model.eval()(images)         # a dict per image: boxes, labels, scores, masks

    ``detector`` is ``mask_rcnn``, ``cascade_mask_rcnn``, or for boxes only ``faster_rcnn`` or ``retinanet``;
    ``backbone`` any timm model, ours included, that returns feature maps; ``pretrained`` loads timm's weights
    for it.
    ``images`` are a list of ``(3, H, W)`` from 0 to 1, of any sizes. Labels count from 1, as in torchvision;
    0 is the background. Masks are ``(n, H, W)`` bool. In training mode images are not resized; in eval mode
    the short side becomes ``short`` unless the long one would exceed ``long``, and detections are in pixels
    of the original image. A smaller detector has fewer channels (``width``), a narrower box head
    (``hidden``) and samples fewer ``regions`` per image. ``out_indices`` selects other maps than those of
    stride 4 and coarser; ``backbone_args`` are passed to ``timm.create_model``.
    """
    if detector not in DETECTORS:
        raise unknown("detector", detector, DETECTORS)
    options = DetectorOptions(
        classes=classes, short=short, long=long, width=width, hidden=hidden, regions=regions
    )
    body = Backbone(backbone, pretrained=pretrained, out_indices=out_indices, options=backbone_args)
    return DETECTORS[detector](body, options)


def build(detector: str, *, classes: int, model_args: Mapping[str, Any]) -> Detector:
    """Call :func:`create` with unchecked arguments from a configuration or a checkpoint."""
    check_model_args(model_args, create, given=("detector", "classes"), what="a detector")
    if "backbone" not in model_args:
        raise UserError(f"model {detector!r} needs a backbone; give one: --model_args.backbone paca_vit_b0")
    return create(detector, classes=classes, **model_args)
