"""STViT: a pyramid of super token attention and convolutions (supplement, Table I).

The ``stvit_iso_*`` variants have no convolutions, for the comparison with Swin (Table II).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from timm.layers import DropPath, LayerNorm2d, LayerScale2d, PatchEmbed, calculate_drop_path_rates
from timm.models import checkpoint
from torch import Tensor, nn

from visualtokens.errors import unknown
from visualtokens.grouping import Tap
from visualtokens.layers import ConvFFN, ResidualConv, SuperTokenAttention, convolutions
from visualtokens.layers.attention import RelativePosition
from visualtokens.layers.convolutions import channels_last, to_map, to_tokens
from visualtokens.models.pyramid import Pyramid, init_weights
from visualtokens.models.registry import ImageSize, check_size, register_family
from visualtokens.models.released import ReleasedNames
from visualtokens.ops.super_tokens import Border

SMALL: dict[str, Any] = dict(channels=(64, 128, 320, 512), depths=(3, 5, 9, 3), heads=(1, 2, 5, 8))
SWIN_T: dict[str, Any] = dict(channels=(96, 192, 384, 768), depths=(2, 2, 6, 2), heads=(3, 6, 12, 24))
LAYER_SCALE: dict[str, Any] = dict(layer_scale=(0.0, 0.0, 1e-6, 1e-6))  # in stages 3 and 4 only
ISO: dict[str, Any] = dict(stem="patch", convolutions=False, projection=0)
RPE: dict[str, Any] = dict(position=True)

CONFIGS: dict[str, dict[str, Any]] = {
    "stvit_small": SMALL | dict(drop_path_rate=0.1),
    "stvit_base": LAYER_SCALE
    | dict(channels=(96, 192, 384, 512), depths=(4, 6, 14, 6), heads=(2, 3, 6, 8), drop_path_rate=0.4),
    "stvit_large": LAYER_SCALE
    | dict(channels=(96, 192, 448, 640), depths=(4, 7, 19, 8), heads=(2, 3, 7, 10), drop_path_rate=0.6),
    "stvit_iso_96": SWIN_T | ISO | RPE,
    "stvit_iso_64": SMALL | ISO | RPE,
    "stvit_iso_64_norpe": SMALL | ISO,
}


class MLP(nn.Module):
    """Feed-forward network without convolution: Linear, GELU, Linear on ``(B, N, C)``."""

    def __init__(self, dim: int, *, expansion: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, dim * expansion)
        self.gelu = nn.GELU()
        self.fc2 = nn.Linear(dim * expansion, dim)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        return self.fc2(self.gelu(self.fc1(x)))


class Block(nn.Module):
    """x + dwconv(x), x + STA(LN(x)), x + FFN(BN(x)), on maps ``(B, C, H, W)`` in channels-last memory.

    ``convolutions=False`` omits the first term and the depth-wise convolution of the FFN, and replaces
    BatchNorm by LayerNorm.
    """

    def __init__(
        self,
        dim: int,
        *,
        attn: SuperTokenAttention,
        expansion: int,
        convolutions: bool,
        layer_scale: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.cpe: nn.Module = ResidualConv(dim) if convolutions else nn.Identity()
        self.norm1 = LayerNorm2d(dim, eps=1e-6)
        self.attn = attn
        self.scale1 = LayerScale2d(dim, layer_scale) if layer_scale else nn.Identity()
        self.norm2: nn.Module = nn.BatchNorm2d(dim) if convolutions else LayerNorm2d(dim, eps=1e-6)
        self.ffn: nn.Module = MLP(dim, expansion=expansion)
        if convolutions:
            self.ffn = ConvFFN(dim, expansion=expansion, residual=True, gelu_first=True)
        self.scale2 = LayerScale2d(dim, layer_scale) if layer_scale else nn.Identity()
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cpe(x)
        x = x + self.drop_path(self.scale1(self.attn(self.norm1(x))))
        grid = (x.shape[2], x.shape[3])
        y = to_map(self.ffn(to_tokens(self.norm2(x)), grid), grid)
        return x + self.drop_path(self.scale2(y))

    def init_residual_convolutions(self) -> None:
        """Initialises them small: with PVTv2's initialisation each block would scale the map by 1.7."""
        if isinstance(self.cpe, ResidualConv) and isinstance(self.ffn, ConvFFN):
            for conv in (self.cpe, self.ffn.dwconv):
                nn.init.trunc_normal_(conv.weight, std=0.02)


class Stage(nn.Module):
    """Embed, blocks: ``(B, C_in, H, W)`` to ``(B, C, H / stride, W / stride)``.

    ``hidden`` is the number of channels of the widest map.
    """

    def __init__(self, embed: nn.Module, blocks: Sequence[Block], *, stride: int, hidden: int) -> None:
        super().__init__()
        self.embed = embed
        self.blocks = nn.ModuleList(blocks)
        self.stride, self.hidden = stride, hidden
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        x = channels_last(x)
        images = self.images_per_chunk(x)
        return self.compute(x) if x.shape[0] <= images else self.compute_chunked(x, images)

    def compute(self, x: Tensor) -> Tensor:
        """The stage on the whole batch."""
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x) if self.grad_checkpointing else block(x)
        return x

    def compute_chunked(self, x: Tensor, images: int) -> Tensor:
        """:meth:`compute` on chunks of at most ``images`` images, whose maps stay in the cache."""
        chunks = -(-x.shape[0] // images)
        return torch.cat([self.compute(chunk) for chunk in x.chunk(chunks)])

    def images_per_chunk(self, x: Tensor) -> int:
        """Returns how many images of ``x (B, C, H, W)`` fit into ``STRIP_BYTES`` with their widest map.

        Returns the whole batch where chunks do not help or are wrong: BatchNorm in training needs the whole
        batch, a compiled graph would grow, and a recorded tap must see all images at once.
        """
        batch, _, height, width = x.shape
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or not x.is_cpu:
            return batch
        widest = self.hidden * (height // self.stride) * (width // self.stride) * x.element_size()
        images = max(1, convolutions.STRIP_BYTES // max(1, widest))
        if images < batch and any(isinstance(m, Tap) and m.wanted() for m in self.modules()):
            return batch
        return images


def conv_stem(in_chans: int, dim: int) -> nn.Sequential:
    """Four 3×3 convolutions, the first and third of stride 2, each followed by GELU and BatchNorm."""
    layers: list[nn.Module] = []
    for width, stride in ((dim // 2, 2), (dim // 2, 1), (dim, 2), (dim, 1)):
        layers += [nn.Conv2d(in_chans, width, 3, stride, padding=1), nn.GELU(), nn.BatchNorm2d(width)]
        in_chans = width
    return nn.Sequential(*layers)


def patch_stem(in_chans: int, dim: int) -> PatchEmbed:
    """4×4 patches, then LayerNorm. Images are zero-padded to whole patches."""
    norm = functools.partial(LayerNorm2d, eps=1e-6)
    return PatchEmbed(None, 4, in_chans, dim, norm_layer=norm, flatten=False, dynamic_img_pad=True)


def merge(dim_in: int, dim: int) -> nn.Sequential:
    """Patch merging: a 3×3 convolution of stride 2, then BatchNorm."""
    return nn.Sequential(nn.Conv2d(dim_in, dim, 3, 2, padding=1), nn.BatchNorm2d(dim))


def project(dim_in: int, dim: int) -> nn.Sequential:
    """1×1 convolution, BatchNorm, Swish."""
    return nn.Sequential(nn.Conv2d(dim_in, dim, 1), nn.BatchNorm2d(dim), nn.SiLU())


def super_token_grids(img_size: tuple[int, int], cells: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the grid of super tokens in each stage; cells at the border may be cut."""
    rows, columns = (
        [math.ceil(math.ceil(side / (4 * 2**i)) / cell) for i, cell in enumerate(cells)] for side in img_size
    )
    return list(zip(rows, columns, strict=True))


STEMS: dict[str, Callable[[int, int], nn.Module]] = {"conv": conv_stem, "patch": patch_stem}


class STViT(ReleasedNames, Pyramid):
    """Stem, four stages of blocks with super token attention, a projection, the classifier.

    ``cells`` are the grid sizes of Table I, tokens per side of a super token's cell; 1 is plain attention.
    ``border="released"`` reproduces the released models, ``"exact"`` gives no weight to neighbours outside
    the map; see :func:`~visualtokens.ops.super_token_association`. ``projection`` is the number of
    channels between the last stage and the pooling, 0 for a LayerNorm instead. Without convolutions
    (Table II): ``stem="patch"``, ``convolutions=False`` and ``position=True``, which learns a relative
    position bias for the super tokens of images of ``img_size``.
    """

    def __init__(
        self,
        *,
        channels: Sequence[int],
        depths: Sequence[int],
        heads: Sequence[int],
        cells: Sequence[int] = (8, 4, 1, 1),
        n_iter: int = 1,
        border: Border = "exact",
        expansion: int = 4,
        layer_scale: Sequence[float] = (0.0, 0.0, 0.0, 0.0),
        stem: str = "conv",
        convolutions: bool = True,
        position: bool = False,
        img_size: ImageSize = 224,
        projection: int = 1024,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        if stem not in STEMS:
            raise unknown("stem", stem, STEMS)
        drop_paths = calculate_drop_path_rates(drop_path_rate, depths, stagewise=True)
        windows = super_token_grids(check_size(img_size), cells)
        stages: list[Stage] = []
        for i, dim in enumerate(channels):
            attention = functools.partial(
                SuperTokenAttention,
                dim,
                heads=heads[i],
                cell=(cells[i], cells[i]),
                n_iter=n_iter,
                border=border,
                window=windows[i] if position else None,
            )
            blocks = [
                Block(
                    dim,
                    attn=attention(),
                    expansion=expansion,
                    convolutions=convolutions,
                    layer_scale=layer_scale[i],
                    drop_path=drop_path,
                )
                for drop_path in drop_paths[i]
            ]
            embed = merge(channels[i - 1], dim) if i > 0 else STEMS[stem](in_chans, dim)
            stages.append(Stage(embed, blocks, stride=2 if i > 0 else 4, hidden=expansion * dim))
        super().__init__(
            stages,
            channels=channels,
            strides=[4 * 2**i for i in range(len(channels))],
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=global_pool,
            drop_rate=drop_rate,
            final=project(channels[-1], projection) if projection else LayerNorm2d(channels[-1], eps=1e-6),
            num_features=projection or channels[-1],
        )
        self.cells = tuple(cells)
        init_weights(self)
        for module in self.modules():
            if isinstance(module, Block):
                module.init_residual_convolutions()

    def set_input_size(
        self, img_size: ImageSize | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Changes the input size in ``pretrained_cfg``, and interpolates relative positions for it."""
        super().set_input_size(img_size, patch_size)
        if img_size is None:
            return
        windows = super_token_grids(check_size(img_size), self.cells)
        for stage, window in zip(self.stages, windows, strict=False):  # the last stages may be pruned
            for module in stage.modules():
                if isinstance(module, RelativePosition):
                    module.set_window(window)

    def use_released(self, options: Mapping[str, Any]) -> None:
        """Sets the ``border`` that the released weights were trained with."""
        for module in self.modules():
            if isinstance(module, SuperTokenAttention) and "border" in options:
                module.border = options["border"]

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith("position.table")}


register_family(
    __name__,
    STViT,
    CONFIGS,
    default_cfg=dict(first_conv="stages.0.embed.0"),
    default_cfgs={
        n: dict(first_conv="stages.0.embed.proj") for n, c in CONFIGS.items() if c.get("stem") == "patch"
    },
)
