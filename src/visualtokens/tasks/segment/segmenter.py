"""A backbone with a head that gives every pixel a class."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.errors import UserError
from visualtokens.tasks.segment.backbone import Backbone
from visualtokens.tasks.segment.fpn import SemanticHead, resize

SMALLEST = 32  # sides that every backbone takes; smaller images are padded to it


class PyramidDecoder(nn.Module):
    """A feature pyramid and the head that reads it."""

    def __init__(self, pyramid: nn.Module, head: SemanticHead) -> None:
        super().__init__()
        self.pyramid = pyramid
        self.head = head

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        return self.head(self.pyramid(maps))


class Segmenter(nn.Module):
    """Images ``(B, 3, H, W)`` of any size to logits ``(B, classes, H, W)``.

    ``decoder`` turns the maps of the backbone into logits at the resolution of the finest map. A model with
    an ``auxiliary`` head gives a pair of logits while it is in training mode: its own and that head's.
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
        below, right = (max(SMALLEST - side, 0) for side in size)
        if below or right:  # repeat the last row and column, and leave what they give out again
            images = F.pad(images, (0, right, 0, below), mode="replicate")
        maps = self.backbone(images)
        logits = self._enlarge(self.decoder(maps), images, size)
        if self.auxiliary is None or not self.training:
            return logits
        return logits, self._enlarge(self.auxiliary(maps[auxiliary_level(len(maps))]), images, size)

    def _enlarge(self, logits: Tensor, images: Tensor, size: Sequence[int]) -> Tensor:
        return resize(logits, images.shape[2:])[:, :, : size[0], : size[1]]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.backbone.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}


def auxiliary_level(levels: int) -> int:
    """The map that the auxiliary head reads: the last but one, stride 16 of the usual four."""
    return max(levels - 2, 0)
