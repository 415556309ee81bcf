"""Swin with the channels, depths and heads of the ``stvit_iso_*`` models (STViT, Table II).

The network is timm's. In the "global" variant the third stage attends over the whole 14×14 map.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import ClassifierHead, PatchEmbed, calculate_drop_path_rates, to_2tuple
from timm.models.swin_transformer import (
    SwinTransformer,
    SwinTransformerStage,
    WindowAttention,
    get_relative_position_index,
)
from torch import nn

from visualtokens.layers.attention import resize_positions
from visualtokens.models.registry import ImageSize, check_size, record_size, register_family
from visualtokens.models.released import ReleasedNames

NARROW: dict[str, Any] = dict(channels=(64, 128, 320, 512), depths=(3, 5, 9, 3), heads=(1, 2, 5, 8))

CONFIGS: dict[str, dict[str, Any]] = {
    "swin_iso_96": dict(channels=(96, 192, 384, 768), depths=(2, 2, 6, 2), heads=(3, 6, 12, 24)),
    "swin_iso_64": NARROW,
    "swin_iso_64_global": NARROW | dict(windows=(7, 7, None, 7)),
    "swin_iso_64_norpe": NARROW | dict(position=False),
}


class Swin(ReleasedNames, SwinTransformer):
    """timm's Swin with any channels per stage, for images of any size.

    ``windows`` are the sides of the attention windows per stage; None is the whole map of images of
    ``img_size``. ``position=False`` omits the relative position bias.
    """

    def __init__(
        self,
        *,
        channels: Sequence[int],
        depths: Sequence[int],
        heads: Sequence[int],
        windows: Sequence[int | None] = (7, 7, 7, 7),
        position: bool = True,
        img_size: ImageSize = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__(
            img_size=check_size(img_size, least=4 * 2 ** (len(channels) - 1)),
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
        self.position, self.windows = position, tuple(windows)
        stages = []
        for i, (dim, grid) in enumerate(zip(channels, self._grids(len(channels)), strict=True)):
            stage = SwinTransformerStage(
                dim=channels[max(i - 1, 0)],
                out_dim=dim,
                input_resolution=_input_grid(i, grid),
                depth=depths[i],
                downsample=i > 0,
                num_heads=heads[i],
                window_size=windows[i] or grid,
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

    def set_input_size(
        self,
        img_size: ImageSize | None = None,
        patch_size: int | tuple[int, int] | None = None,
        window_size: int | tuple[int, int] | None = None,
        window_ratio: int = 8,
        always_partition: bool | None = None,
    ) -> None:
        """Changes the input size, and interpolates the relative positions for the new windows.

        As timm's: the windows are of ``window_size``, by default the grid of patches divided by
        ``window_ratio``. Windows over the whole map stay so. ``patch_size`` resamples the patch embedding.
        """
        patch = to_2tuple(patch_size or self.patch_embed.patch_size)
        least = max(patch) * 2 ** (len(self.windows) - 1)
        size = check_size(self.patch_embed.img_size if img_size is None else img_size, least=least)
        self.patch_embed.set_input_size(img_size=size, patch_size=patch)
        stages: Any = self.layers
        grids = self._grids(len(stages))
        if window_size is None:
            window_size = max(grids[0][0] // window_ratio, 1), max(grids[0][1] // window_ratio, 1)
        for i, (stage, grid) in enumerate(zip(stages, grids, strict=True)):
            window = to_2tuple(window_size) if self.windows[i] else grid
            for block in stage.blocks:
                partition = block.always_partition if always_partition is None else always_partition
                used = window if partition else (min(window[0], grid[0]), min(window[1], grid[1]))
                _set_window_size(block.attn, used)
            stage.set_input_size(_input_grid(i, grid), window, always_partition)
            self.feature_info[i]["reduction"] = max(patch) * 2**i
        if not self.position:
            self._remove_positions()
        record_size(self, size)

    def _grids(self, stages: int) -> list[tuple[int, int]]:
        """Returns the map of each stage; images and maps are padded to whole patches."""
        height, width = self.patch_embed.dynamic_feat_size(self.patch_embed.img_size)
        return [(math.ceil(height / 2**i), math.ceil(width / 2**i)) for i in range(stages)]

    def _remove_positions(self) -> None:
        """Replaces the learned bias tables by zeros that are not parameters."""
        for module in self.modules():
            if isinstance(module, WindowAttention):
                zeros = torch.zeros_like(module.relative_position_bias_table.data)
                del module.relative_position_bias_table
                module.register_buffer("relative_position_bias_table", zeros, persistent=False)

    def init_non_persistent_buffers(self) -> None:
        """Fills the buffers that no checkpoint holds, after the model was built without values."""
        for module in self.modules():
            if isinstance(module, WindowAttention) and not self.position:
                module.relative_position_bias_table.zero_()


def _input_grid(stage: int, grid: tuple[int, int]) -> tuple[int, int]:
    """Returns the input's grid for a stage's map; all but the first stage halve it."""
    return grid if stage == 0 else (2 * grid[0], 2 * grid[1])


def _set_window_size(attn: WindowAttention, window: tuple[int, int]) -> None:
    """As the method of timm, which expects the table of a square window."""
    rows, columns = attn.window_size
    old = attn.relative_position_bias_table  # (offsets, heads)
    table = old.detach().T.unflatten(1, (2 * rows - 1, 2 * columns - 1))  # (heads, 2H - 1, 2W - 1)
    table = resize_positions(table, window).flatten(1).T.clone(memory_format=torch.contiguous_format)
    attn.window_size, attn.window_area = window, window[0] * window[1]
    attn.relative_position_bias_table = nn.Parameter(table, requires_grad=old.requires_grad)
    index = get_relative_position_index(*window).to(table.device)
    attn.register_buffer("relative_position_index", index, persistent=False)


register_family(
    __name__,
    Swin,
    CONFIGS,
    default_cfg=dict(first_conv="patch_embed.proj", classifier="head.fc"),
)
