"""PaCa-ViT: patches attend to learned clusters. B0, B1 and B2 of the paper, Table 1."""

from __future__ import annotations

from collections.abc import Sequence

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import DropPath, calculate_drop_path_rates
from timm.models import checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.layers import ConvClustering, PaCaAttention
from visualtokens.layers.maps import to_map, to_tokens
from visualtokens.models.pyramid import Pyramid, channels_last, init_weights
from visualtokens.models.registry import register_family

IMAGENET_STEM = ((7, 4), (3, 2), (3, 2), (3, 2))  # (kernel, stride) of each stage's first convolution
SMALL_STEM = ((3, 1), (3, 2), (3, 2), (3, 1))

B0 = dict(channels=(32, 64, 160, 256), depths=(2, 2, 2, 2))
B1 = dict(channels=(64, 128, 320, 512), depths=(2, 2, 2, 2))
B2 = dict(channels=(64, 128, 320, 512), depths=(3, 4, 6, 3))
IMAGENET = dict(convolutions=IMAGENET_STEM, clusters=(49, 49, 49, 0))
SMALL = dict(convolutions=SMALL_STEM, clusters=(64, 64, 0, 0))

CONFIGS = {
    "paca_vit_b0": B0 | IMAGENET,
    "paca_vit_b1": B1 | IMAGENET,
    "paca_vit_b2": B2 | IMAGENET,
    "paca_vit_b0_32": B0 | SMALL,
    "paca_vit_b1_32": B1 | SMALL,
    "paca_vit_b2_32": B2 | SMALL,
    # Not of the paper: for 32×32 images on a laptop, and for tests.
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
    """Stem or transition: a convolution, then LayerNorm. Gives ``(B, N, C)`` and its grid."""

    def __init__(self, in_chans: int, dim: int, *, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_chans, dim, kernel, stride, padding=kernel // 2)
        self.norm = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        x = self.conv(channels_last(x))
        return self.norm(to_tokens(x)), (x.shape[2], x.shape[3])


class ConvFFN(nn.Module):
    """Linear, 3×3 depth-wise convolution, GELU, Linear."""

    def __init__(self, dim: int, *, expansion: int) -> None:
        super().__init__()
        hidden = dim * expansion
        self.fc1 = nn.Linear(dim, hidden)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        h = self.dwconv(to_map(self.fc1(x), grid))  # (B, expansion · C, H, W)
        return self.fc2(F.gelu(to_tokens(h)))


class Block(nn.Module):
    """PaCa Eq. 2, 3: x + attn(LN(x)), x + ffn(LN(x))."""

    def __init__(
        self, dim: int, *, heads: int, clusters: int, reduction: int, expansion: int, drop_path: float
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = PaCaAttention(dim, heads=heads, clusters=clusters, reduction=reduction)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.ffn = ConvFFN(dim, expansion=expansion)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x), grid))
        return x + self.drop_path(self.ffn(self.norm2(x), grid))


class Stage(nn.Module):
    """Embed, blocks, LayerNorm: ``(B, C_in, H, W)`` to ``(B, C, H / stride, W / stride)``."""

    def __init__(self, embed: Embed, blocks: Sequence[Block], dim: int) -> None:
        super().__init__()
        self.embed = embed
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        x, grid = self.embed(x)  # (B, N, C)
        for block in self.blocks:
            x = checkpoint(block, x, grid) if self.grad_checkpointing else block(x, grid)
        return to_map(self.norm(x), grid)


class PaCaViT(Pyramid):
    """A PVTv2 pyramid whose attention is patch-to-cluster. A stage with 0 clusters attends to itself."""

    def __init__(
        self,
        *,
        channels: Sequence[int],
        depths: Sequence[int],
        clusters: Sequence[int],
        convolutions: Sequence[tuple[int, int]] = IMAGENET_STEM,
        heads: Sequence[int] = (1, 2, 5, 8),
        expansions: Sequence[int] = (8, 8, 4, 4),
        reduction: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        drop_paths = calculate_drop_path_rates(drop_path_rate, sum(depths))
        stages: list[Stage] = []
        strides: list[int] = []
        before = in_chans
        for i, (dim, (kernel, stride)) in enumerate(zip(channels, convolutions, strict=True)):
            blocks = [
                Block(
                    dim,
                    heads=heads[i],
                    clusters=clusters[i],
                    reduction=reduction,
                    expansion=expansions[i],
                    drop_path=drop_paths[sum(depths[:i]) + j],
                )
                for j in range(depths[i])
            ]
            stages.append(Stage(Embed(before, dim, kernel=kernel, stride=stride), blocks, dim))
            strides.append(stride * (strides[-1] if strides else 1))
            before = dim
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
            if isinstance(module, ConvClustering):
                module.init_clusters()


_IMAGENET_CFG = dict(
    num_classes=1000,
    input_size=(3, 224, 224),
    pool_size=(7, 7),
    crop_pct=0.9,
    interpolation="bicubic",
    mean=IMAGENET_DEFAULT_MEAN,
    std=IMAGENET_DEFAULT_STD,
    first_conv="stages.0.embed.conv",
    classifier="head",
    fixed_input_size=False,
)
_SMALL_CFG = dict(input_size=(3, 32, 32), num_classes=100, pool_size=(8, 8), crop_pct=1.0)

register_family(
    __name__,
    PaCaViT,
    CONFIGS,
    default_cfg=_IMAGENET_CFG,
    default_cfgs={n: _SMALL_CFG for n in CONFIGS if n.endswith("_32")}
    | {"paca_vit_nano": _SMALL_CFG | dict(num_classes=10, pool_size=(4, 4))},
)
