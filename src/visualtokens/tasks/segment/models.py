"""Segmentation models by name: a backbone, a decoder, an optional auxiliary head."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.errors import UserError, unknown
from visualtokens.tasks.segment.heads import FPN, VTFPN, AuxiliaryHead, SemanticHead, UperNet, resize
from visualtokens.tasks.timm_models import Backbone, Matcher, check_model_args, matcher_under

MAX_CLASSES = 255  # a mask has one byte per pixel, and 255 means unlabelled

Build = Callable[[Backbone, int, Mapping[str, Any]], nn.Module]


def _upernet(backbone: Backbone, classes: int, args: Mapping[str, Any]) -> nn.Module:
    return UperNet(backbone.channels, classes, **_known("upernet", UperNet, args))


def _pyramid(name: str, kind: type[FPN] | type[VTFPN]) -> Build:
    def build(backbone: Backbone, classes: int, args: Mapping[str, Any]) -> nn.Module:
        own = {key: value for key, value in args.items() if key != "width"}
        pyramid = kind(backbone.channels, **_known(name, kind, own, also=("width",)))
        width = {"width": args["width"]} if "width" in args else {}
        return PyramidDecoder(pyramid, SemanticHead(pyramid.dim, backbone.strides, classes, **width))

    return build


HEADS: Mapping[str, Build] = {
    "fpn": _pyramid("fpn", FPN),
    "vt_fpn": _pyramid("vt_fpn", VTFPN),
    "upernet": _upernet,
}


def create(
    head: str,
    *,
    backbone: str,
    classes: int,
    pretrained: bool = False,
    auxiliary: bool | None = None,
    out_indices: Sequence[int] | None = None,
    stride_first: bool = False,
    in_chans: int = 3,
    backbone_args: Mapping[str, Any] | None = None,
    head_args: Mapping[str, Any] | None = None,
) -> Segmenter:
    """Return a model that assigns one of ``classes`` classes to every pixel.

    >>> model = visualtokens.segment.create("vt_fpn", backbone="resnet50", classes=91)
    >>> model(images)   # (B, 91, H, W)

    ``head`` is ``fpn`` (panoptic FPN's semantic branch), ``vt_fpn`` or ``upernet``; ``backbone`` any timm
    model, ours included, that returns feature maps; ``pretrained`` loads timm's weights for it.
    ``auxiliary`` adds an auxiliary head that is used in training only; by default ``upernet`` has one.
    ``out_indices`` selects other maps than those of stride 4 and coarser. ``stride_first`` puts the stride of
    a ResNet stage in its first 1×1 convolution, as in the original ResNet and in Visual Transformers.
    ``backbone_args`` are passed to ``timm.create_model``; ``head_args`` are ``dim`` (channels of the
    pyramid), ``width`` (channels of the head, ``fpn`` and ``vt_fpn``), ``tokens``, ``token_dim``,
    ``attn_dim``, ``groups``, ``hidden`` (``vt_fpn``), ``dropout`` (``upernet``).
    """
    if head not in HEADS:
        raise unknown("head", head, HEADS)
    if not 1 <= classes <= MAX_CLASSES:
        raise UserError(f"classes={classes} must be from 1 to {MAX_CLASSES}")
    body = Backbone(
        backbone,
        pretrained=pretrained,
        out_indices=out_indices,
        stride_first=stride_first,
        in_chans=in_chans,
        options=backbone_args,
    )
    decoder = HEADS[head](body, classes, head_args or {})
    extra = None
    if head == "upernet" if auxiliary is None else auxiliary:
        extra = AuxiliaryHead(body.channels[auxiliary_level(len(body.channels))], classes)
    return Segmenter(body, decoder, classes=classes, auxiliary=extra)


def build(head: str, *, classes: int, model_args: Mapping[str, Any]) -> Segmenter:
    """Call :func:`create` with unchecked arguments from a configuration or a checkpoint."""
    check_model_args(model_args, create, given=("head", "classes"), what="a segmentation model")
    if "backbone" not in model_args:
        raise UserError(f"model {head!r} needs a backbone; give one, such as --model_args.backbone resnet50")
    return create(head, classes=classes, **model_args)


def _known(
    head: str, kind: Callable[..., nn.Module], args: Mapping[str, Any], *, also: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the arguments if all of them are options of this head."""
    options = [p.name for p in inspect.signature(kind).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for name in args:
        if name not in options:
            raise unknown(f"head_args of {head}", name, (*options, *also))
    return dict(args)


MIN_SIDE = 32  # smaller images are padded to this side, which every backbone accepts


class PyramidDecoder(nn.Module):
    """A feature pyramid and its head."""

    def __init__(self, pyramid: nn.Module, head: SemanticHead) -> None:
        super().__init__()
        self.pyramid = pyramid
        self.head = head

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        return self.head(self.pyramid(maps))


class Segmenter(nn.Module):
    """Images ``(B, 3, H, W)`` of any size to logits ``(B, classes, H, W)``.

    ``decoder`` maps the feature maps to logits at the resolution of the finest one. In training mode, a
    model with an ``auxiliary`` head returns a pair: its logits and those of the auxiliary head.
    """

    def __init__(
        self, backbone: Backbone, decoder: nn.Module, *, classes: int, auxiliary: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.decoder = decoder
        self.auxiliary = auxiliary
        self.classes = classes

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        size = images.shape[2:]
        if min(size) < 1:
            raise UserError(f"images of {size[0]}×{size[1]} have no pixels to classify")
        below, right = (max(MIN_SIDE - side, 0) for side in size)
        if below or right:  # repeat the last row and column; their logits are cropped
            images = F.pad(images, (0, right, 0, below), mode="replicate")
        maps = self.backbone(images)
        logits = self._upsample(self.decoder(maps), images, size)
        if self.auxiliary is None or not self.training:
            return logits
        return logits, self._upsample(self.auxiliary(maps[auxiliary_level(len(maps))]), images, size)

    def _upsample(self, logits: Tensor, images: Tensor, size: Sequence[int]) -> Tensor:
        return resize(logits, images.shape[2:])[:, :, : size[0], : size[1]]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.backbone.set_grad_checkpointing(enable)

    def group_matcher(self, coarse: bool = False) -> Matcher:
        return matcher_under("backbone.", self.backbone.group_matcher(coarse))

    def no_weight_decay(self) -> set[str]:
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}


def auxiliary_level(levels: int) -> int:
    """Return the level of the auxiliary head: the last but one, stride 16 of the usual four."""
    return max(levels - 2, 0)
