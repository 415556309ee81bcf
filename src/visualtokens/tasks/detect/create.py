"""Making a detector by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from visualtokens.errors import UserError, unknown
from visualtokens.tasks.backbone import Backbone, check_options
from visualtokens.tasks.detect.cascade import CascadeMaskRCNN
from visualtokens.tasks.detect.detectors import DetectorOptions, MaskRCNN, RetinaNet

Detector = MaskRCNN | CascadeMaskRCNN | RetinaNet

DETECTORS: Mapping[str, type[MaskRCNN] | type[CascadeMaskRCNN] | type[RetinaNet]] = {
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
    """A detector of ``classes`` kinds of objects, used as torchvision's are.

    >>> model = visualtokens.detect.create("mask_rcnn", backbone="paca_vit_b0", classes=80)
    >>> losses = model(images, targets)      # in training mode
    >>> found = model.eval()(images)         # a dict per image: boxes, labels, scores, masks

    ``detector`` is ``mask_rcnn``, ``cascade_mask_rcnn`` or ``retinanet`` (boxes only); ``backbone`` any
    model of timm, ours included, that gives maps; ``pretrained`` loads timm's weights for it.
    ``images`` are a list of ``(3, H, W)`` from 0 to 1, of any sizes. Labels count from 1, as torchvision's
    do: 0 is the background. Masks are ``(n, H, W)`` bool. In training mode images keep the size they come
    with; otherwise the short side becomes ``short`` unless the long one would then exceed ``long``, and
    findings are in pixels of the image as it came. A smaller detector has fewer channels (``width``), a
    narrower box head (``hidden``) and learns from fewer ``regions`` per image. ``out_indices`` chooses other
    maps than those of stride 4 and coarser; ``backbone_args`` go to ``timm.create_model``.
    """
    if detector not in DETECTORS:
        raise unknown("detector", detector, DETECTORS)
    options = DetectorOptions(
        classes=classes, short=short, long=long, width=width, hidden=hidden, regions=regions
    )
    check_options(backbone_args or {})
    body = Backbone(backbone, pretrained=pretrained, out_indices=out_indices, options=backbone_args)
    return DETECTORS[detector](body, options)


def build(detector: str, *, classes: int, model_args: Mapping[str, Any]) -> Detector:
    """:func:`create` with arguments from a configuration or a checkpoint, which may be wrong."""
    options = [name for name in inspect.signature(create).parameters if name not in ("detector", "classes")]
    for name in model_args:
        if name not in options:
            raise unknown("model_args of a detector", name, options)
    if "backbone" not in model_args:
        raise UserError(f"model {detector!r} needs a backbone; give one: --model_args.backbone paca_vit_b0")
    return create(detector, classes=classes, **model_args)
