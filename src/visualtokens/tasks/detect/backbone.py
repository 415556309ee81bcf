"""Any backbone of timm's registry, which holds ours, under a feature pyramid."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, FeaturePyramidNetwork, LastLevelP6P7

from visualtokens.errors import UserError
from visualtokens.tasks.segment.backbone import Backbone

COARSEST = 64  # stride of the last level; a backbone that ends before it is pooled down to it


class PyramidBackbone(nn.Module):
    """Images to the levels of a feature pyramid, finest first, of ``strides`` and ``width`` channels.

    Of several maps of the backbone with the same stride, the deepest is used; those finer than ``finest``
    are not. What the backbone lacks to stride 64 is pooled from its coarsest level, as Mask R-CNN does with
    its fifth; ``convolved`` adds two levels by convolution instead, as RetinaNet does.
    """

    def __init__(self, body: Backbone, *, width: int = 256, finest: int = 4, convolved: bool = False) -> None:
        super().__init__()
        self.body = body
        self.out_channels = width  # torchvision's detectors read it
        deepest = {stride: i for i, stride in enumerate(body.strides)}  # the last of a stride wins
        usable = [s for s in deepest if s >= finest] or [max(deepest)]
        _check_strides(usable)
        self._take = {str(stride): deepest[stride] for stride in usable}
        channels = [body.channels[i] for i in self._take.values()]
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
        """The parameters that the backbone wants left alone, by their names behind ``prefix``."""
        return {f"{prefix}body.{name}" for name in self.body.no_weight_decay()}

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        maps = self.body(images)
        return self.fpn(OrderedDict((name, maps[i]) for name, i in self._take.items()))


def _check_strides(strides: Sequence[int]) -> None:
    for finer, coarser in itertools.pairwise(strides):
        if coarser != 2 * finer:
            raise UserError(
                f"a pyramid needs maps whose stride doubles, the backbone's have {tuple(strides)}; "
                "choose others with out_indices"
            )


class _Pooled(ExtraFPNBlock):
    """Every second position of the level before, once for each of these strides, which name the levels."""

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
