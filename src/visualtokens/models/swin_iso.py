"""Swin with the channels, depths and heads of the ``stvit_iso_*`` models (STViT, Table II).

The network is timm's. In the "global" variant the third stage attends over the whole 14×14 map.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import ClassifierHead, PatchEmbed, calculate_drop_path_rates
from timm.models.swin_transformer import SwinTransformer, SwinTransformerStage, WindowAttention
from torch import nn

from visualtokens.models.registry import register_family

NARROW: dict[str, Any] = dict(channels=(64, 128, 320, 512), depths=(3, 5, 9, 3), heads=(1, 2, 5, 8))

CONFIGS: dict[str, dict[str, Any]] = {
    "swin_iso_96": dict(channels=(96, 192, 384, 768), depths=(2, 2, 6, 2), heads=(3, 6, 12, 24)),
    "swin_iso_64": NARROW,
    "swin_iso_64_global": NARROW | dict(windows=(7, 7, 14, 7)),
    "swin_iso_64_norpe": NARROW | dict(position=False),
}


class Swin(SwinTransformer):
    """timm's Swin with any channels per stage, for images of any size.

    ``windows`` are the sides of the attention windows per stage, for images of ``img_size``.
    ``position=False`` omits the relative position bias.
    """

    def __init__(
        self,
        *,
        channels: Sequence[int],
        depths: Sequence[int],
        heads: Sequence[int],
        windows: Sequence[int] = (7, 7, 7, 7),
        position: bool = True,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__(
            img_size=img_size,
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=global_pool,
            embed_dim=channels[0],
            depths=(0,) * len(depths),
            num_heads=tuple(heads),
            strict_img_size=False,
            drop_rate=drop_rate,
            embed_layer=functools.partial(PatchEmbed, dynamic_img_pad=True),
        )
        # timm's constructor would double the channels in each stage.
        rates = calculate_drop_path_rates(drop_path_rate, depths, stagewise=True)
        height, width = self.patch_embed.grid_size
        stages = []
        for i, dim in enumerate(channels):
            stride = 2 ** max(i - 1, 0)  # of the stage's input; all but the first stage halve it
            stage = SwinTransformerStage(
                dim=channels[max(i - 1, 0)],
                out_dim=dim,
                input_resolution=(height // stride, width // stride),
                depth=depths[i],
                downsample=i > 0,
                num_heads=heads[i],
                window_size=windows[i],
                dynamic_mask=True,
                drop_path=rates[i],
            )
            stages.append(stage)
            self.feature_info[i]["num_chs"] = dim
        self.layers = nn.Sequential(*stages)
        self.num_features = self.head_hidden_size = channels[-1]
        self.norm = nn.LayerNorm(channels[-1])
        self.head = ClassifierHead(
            channels[-1], num_classes, pool_type=global_pool, drop_rate=drop_rate, input_fmt=self.output_fmt
        )
        self.init_weights(needs_reset=False)
        if not position:
            self._remove_positions()

    def _remove_positions(self) -> None:
        """Replaces the learned bias tables by zeros that are not parameters."""
        for module in self.modules():
            if isinstance(module, WindowAttention):
                zeros = torch.zeros_like(module.relative_position_bias_table.data)
                del module.relative_position_bias_table
                module.register_buffer("relative_position_bias_table", zeros, persistent=False)


register_family(
    __name__,
    Swin,
    CONFIGS,
    default_cfg=dict(first_conv="patch_embed.proj", classifier="head.fc"),
)
