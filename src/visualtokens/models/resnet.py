"""ResNet for 32×32 images, the baseline of the small VT-ResNets: timm's network, which lacks such a stem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.layers import make_divisible
from timm.models.resnet import BasicBlock, ResNet
from torch import nn

from visualtokens.errors import UserError
from visualtokens.models.registry import AnySize, register_family

CONFIGS: dict[str, dict[str, Any]] = {"resnet18_32": dict(depths=(2, 2, 2, 2))}
LEVELS = 5  # maps: stem, layer1 to layer4


class ResNet32(AnySize, ResNet):
    """timm's ResNet with the stem of ``vt_resnet18`` for small images: a 3×3 convolution of stride 1.

    ``width`` scales all channels, as in VT-ResNets.
    """

    def __init__(
        self, *, depths: Sequence[int], width: float = 1.0, in_chans: int = 3, **options: Any
    ) -> None:
        if width <= 0:
            raise UserError(f"width={width}; give a factor above 0, such as 0.25")
        channels = [make_divisible(c * width, 8) for c in (64, 128, 256, 512)]
        stem = dict(stem_type="deep", stem_width=channels[0] // 2)  # a plain stem would have 64 channels
        super().__init__(BasicBlock, tuple(depths), channels=channels, in_chans=in_chans, **stem, **options)
        self.conv1 = nn.Conv2d(in_chans, channels[0], 3, padding=1, bias=False)
        self.maxpool = nn.Identity()
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        for info, stride in zip(self.feature_info, (1, 1, 2, 4, 8), strict=True):
            info["reduction"] = stride


register_family(
    __name__,
    ResNet32,
    CONFIGS,
    levels=LEVELS,
    default_cfg=dict(
        input_size=(3, 32, 32),
        pool_size=(4, 4),
        crop_pct=1.0,
        interpolation="bilinear",
        first_conv="conv1",
        classifier="fc",
    ),
)
