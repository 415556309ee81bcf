"""PaCa-ViT: a pyramid in which patches attend to learned clusters.

B0, B1 and B2 are the paper's models (Table 1); tiny, small and base were released later with weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.layers import DropPath, calculate_drop_path_rates
from timm.models import checkpoint
from torch import Tensor, nn

from visualtokens.layers import Clustering, ConvFFN, PaCaAttention
from visualtokens.layers.convolutions import channels_last, to_map, to_tokens
from visualtokens.layers.paca import ClusteringKind
from visualtokens.models.pyramid import Pyramid, init_weights
from visualtokens.models.registry import register_family
from visualtokens.models.released import ReleasedNames

IMAGENET_STEM = ((7, 4), (3, 2), (3, 2), (3, 2))  # (kernel, stride) of each stage's embedding
SMALL_STEM = ((3, 1), (3, 2), (3, 2), (3, 1))

B0 = dict(channels=(32, 64, 160, 256), depths=(2, 2, 2, 2))
B1 = dict(channels=(64, 128, 320, 512), depths=(2, 2, 2, 2))
B2 = dict(channels=(64, 128, 320, 512), depths=(3, 4, 6, 3))
IMAGENET = dict(convolutions=IMAGENET_STEM, clusters=(49, 49, 49, 0))
SMALL = dict(convolutions=SMALL_STEM, clusters=(64, 64, 0, 0))
RELEASED: dict[str, Any] = dict(
    channels=(96, 192, 320, 384),
    heads=(2, 4, 8, 16),
    expansions=(4, 4, 4, 4),
    clusters=(100, 100, 100, 0),
    clustering="conv",
    per_stage=True,
    convolutions=((3, 2), (3, 2), (3, 2), (3, 2)),
    double_stem=True,
    residual_ffn=True,
    drop_path_rate=0.1,
)

CONFIGS: dict[str, dict[str, Any]] = {
    "paca_vit_b0": B0 | IMAGENET,
    "paca_vit_b1": B1 | IMAGENET,
    "paca_vit_b2": B2 | IMAGENET,
    "paca_vit_b0_32": B0 | SMALL,
    "paca_vit_b1_32": B1 | SMALL,
    "paca_vit_b2_32": B2 | SMALL,
    "paca_vit_tiny": RELEASED | dict(depths=(2, 2, 4, 2)),
    "paca_vit_small": RELEASED | dict(depths=(3, 3, 10, 3)),
    "paca_vit_small_mlp": RELEASED | dict(depths=(3, 3, 10, 3), clustering="mlp"),
    "paca_vit_base": RELEASED | dict(depths=(3, 3, 18, 3), channels=(96, 192, 384, 512), drop_path_rate=0.5),
    # Not in the paper: for 32×32 images on a laptop, and for tests.
    "paca_vit_nano": dict(
        channels=(32, 64, 96, 128),
        depths=(1, 1, 1, 1),
        heads=(1, 2, 3, 4),
        expansions=(4, 4, 4, 4),
        convolutions=((3, 2), (3, 2), (3, 2), (3, 1)),
        clusters=(16, 16, 0, 0),
    ),
}


class Embed(nn.Module):
    """Stem or transition: a strided convolution, then LayerNorm; returns ``(B, N, C)`` and its grid.

    ``double`` inserts another such convolution, to C / 2 channels, before it.
    """

    def __init__(self, in_chans: int, dim: int, *, kernel: int, stride: int, double: bool = False) -> None:
        super().__init__()
        self.first: nn.Module = nn.Identity()
        if double:
            self.first = nn.Conv2d(in_chans, dim // 2, kernel, stride, padding=kernel // 2)
            in_chans = dim // 2
        self.conv = nn.Conv2d(in_chans, dim, kernel, stride, padding=kernel // 2)
        self.norm = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        x = self.conv(self.first(channels_last(x)))
        return self.norm(to_tokens(x)), (x.shape[2], x.shape[3])


class Block(nn.Module):
    """PaCa Eq. 2, 3: x + attn(LN(x)), x + ffn(LN(x))."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        clusters: int,
        clustering: ClusteringKind | None,
        reduction: int,
        expansion: int,
        residual_ffn: bool,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = PaCaAttention(
            dim, heads=heads, clusters=clusters, clustering=clustering, reduction=reduction
        )
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.ffn = ConvFFN(dim, expansion=expansion, residual=residual_ffn)
        self.drop_path = DropPath(drop_path)

    def forward(
        self, x: Tensor, grid: tuple[int, int], weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the patches for ``x (B, N, C)``, and the assignment that was used.

        ``weights (B, N, K)`` is the assignment of an earlier block; it replaces the block's own.
        """
        y = self.norm1(x)
        if weights is None:
            weights = self.attn.assign(y, grid)
        x = x + self.drop_path(self.attn(y, grid, weights))
        return x + self.drop_path(self.ffn(self.norm2(x), grid)), weights


class Stage(nn.Module):
    """Embed, blocks, LayerNorm: ``(B, C_in, H, W)`` to ``(B, C, H / stride, W / stride)``.

    With ``per_stage`` all blocks use the assignment of the first one.
    """

    def __init__(self, embed: Embed, blocks: Sequence[Block], dim: int, *, per_stage: bool = False) -> None:
        super().__init__()
        self.embed = embed
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.per_stage = per_stage
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        x, grid = self.embed(x)  # (B, N, C)
        shared: Tensor | None = None
        for block in self.blocks:
            inputs = (x, grid, shared)
            x, weights = checkpoint(block, *inputs) if self.grad_checkpointing else block(*inputs)
            shared = weights if self.per_stage else None
        return to_map(self.norm(x), grid)


class PaCaViT(ReleasedNames, Pyramid):
    """A PVTv2 pyramid with patch-to-cluster attention; a stage with 0 clusters uses self-attention.

    ``convolutions`` are the (kernel, stride) of each stage's embedding. ``clustering`` is ``"squeeze"`` (the
    paper's), ``"conv"``, ``"mlp"`` or ``"linear"``, in every block or once ``per_stage``. ``double_stem``
    and ``residual_ffn``: see :class:`Embed` and ``ConvFFN``.
    """

    def __init__(
        self,
        *,
        channels: Sequence[int],
        depths: Sequence[int],
        clusters: Sequence[int],
        clustering: ClusteringKind = "squeeze",
        per_stage: bool = False,
        convolutions: Sequence[tuple[int, int]] = IMAGENET_STEM,
        double_stem: bool = False,
        heads: Sequence[int] = (1, 2, 5, 8),
        expansions: Sequence[int] = (8, 8, 4, 4),
        residual_ffn: bool = False,
        reduction: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        drop_paths = calculate_drop_path_rates(drop_path_rate, depths, stagewise=True)
        stages: list[Stage] = []
        strides: list[int] = []
        dim_in, total = in_chans, 1
        for i, (dim, (kernel, stride)) in enumerate(zip(channels, convolutions, strict=True)):
            blocks = [
                Block(
                    dim,
                    heads=heads[i],
                    clusters=clusters[i],
                    clustering=None if per_stage and j > 0 else clustering,
                    reduction=reduction,
                    expansion=expansions[i],
                    residual_ffn=residual_ffn,
                    drop_path=drop_path,
                )
                for j, drop_path in enumerate(drop_paths[i])
            ]
            double = double_stem and i == 0
            embed = Embed(dim_in, dim, kernel=kernel, stride=stride, double=double)
            stages.append(Stage(embed, blocks, dim, per_stage=per_stage))
            total *= stride**2 if double else stride
            strides.append(total)
            dim_in = dim
        super().__init__(
            stages,
            channels=channels,
            strides=strides,
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=global_pool,
            drop_rate=drop_rate,
        )
        init_weights(self)
        for module in self.modules():
            if isinstance(module, Clustering):
                module.init_clusters()


_SMALL_CFG = dict(input_size=(3, 32, 32), num_classes=100, pool_size=(8, 8), crop_pct=1.0)

register_family(
    __name__,
    PaCaViT,
    CONFIGS,
    default_cfg=dict(first_conv="stages.0.embed.conv"),
    default_cfgs={n: _SMALL_CFG for n in CONFIGS if n.endswith("_32")}
    | {n: dict(first_conv="stages.0.embed.first") for n, c in CONFIGS.items() if c.get("double_stem")}
    | {"paca_vit_nano": _SMALL_CFG | dict(num_classes=10, pool_size=(4, 4))},
)
