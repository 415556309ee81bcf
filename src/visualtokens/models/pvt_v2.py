"""PVTv2, the baseline of PaCa-ViT, in variants that timm lacks: for 32×32 images, and "pure".

The network is timm's. Pure means without spatial reduction: each patch attends to all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.models.pvt_v2 import OverlapPatchEmbed, PyramidVisionTransformerV2

from visualtokens.models.registry import AnySize, register_family
from visualtokens.models.released import ReleasedNames

B0: dict[str, Any] = dict(embed_dims=(32, 64, 160, 256), depths=(2, 2, 2, 2))
B1: dict[str, Any] = dict(embed_dims=(64, 128, 320, 512), depths=(2, 2, 2, 2))
B2: dict[str, Any] = dict(embed_dims=(64, 128, 320, 512), depths=(3, 4, 6, 3))
PURE: dict[str, Any] = dict(sr_ratios=(1, 1, 1, 1))
SMALL: dict[str, Any] = dict(sr_ratios=(4, 2, 1, 1), small_stem=True)

CONFIGS = {
    f"pvt_v2_{size}{variant}": widths | options
    for variant, options in {"_32": SMALL, "_pure": PURE, "_pure_32": SMALL | PURE}.items()
    for size, widths in {"b0": B0, "b1": B1, "b2": B2}.items()
}


class PVTv2(ReleasedNames, AnySize, PyramidVisionTransformerV2):
    """timm's PVTv2; ``small_stem`` has strides 1, 2, 2, 1 instead of 4, 2, 2, 2 (PaCa Table 1, CIFAR-100).

    ``stem_stride`` replaces the first of them, for smaller models.
    """

    def __init__(
        self,
        *,
        embed_dims: Sequence[int],
        depths: Sequence[int],
        num_heads: Sequence[int] = (1, 2, 5, 8),
        sr_ratios: Sequence[int] = (8, 4, 2, 1),
        mlp_ratios: Sequence[float] = (8, 8, 4, 4),
        small_stem: bool = False,
        stem_stride: int = 1,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__(
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=global_pool,
            depths=tuple(depths),
            embed_dims=tuple(embed_dims),
            num_heads=tuple(num_heads),
            sr_ratios=tuple(sr_ratios),
            mlp_ratios=tuple(mlp_ratios),
            drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
        )
        if small_stem:
            self._use_small_stem(in_chans, embed_dims[0], stem_stride)

    def _use_small_stem(self, in_chans: int, width: int, stride: int) -> None:
        self.patch_embed = OverlapPatchEmbed(patch_size=3, stride=stride, in_chans=in_chans, embed_dim=width)
        self.patch_embed.apply(self._init_weights)
        self.stages[3].downsample.proj.stride = (1, 1)
        for info, factor in zip(self.feature_info, (1, 2, 4, 4), strict=True):
            info["reduction"] = stride * factor


_SMALL_CFG = dict(input_size=(3, 32, 32), num_classes=100, pool_size=(8, 8), crop_pct=1.0)

register_family(
    __name__,
    PVTv2,
    CONFIGS,
    default_cfg=dict(first_conv="patch_embed.proj"),
    default_cfgs={n: _SMALL_CFG for n in CONFIGS if n.endswith("_32")},
)
