"""Segmentation decoders: FPN with the semantic head of panoptic FPN, VT-FPN and UperNet."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.layers import FilterTokenizer, Projector, TokenTransformer
from visualtokens.layers.convolutions import channels_last

MAX_GROUPS = 32  # of GroupNorm in the semantic head
MIN_GROUP_CHANNELS = 4  # a group of one channel has no variance on a single pixel


class FPN(nn.Module):
    """Feature pyramid: maps of ``channels`` to maps of ``dim`` channels at the same resolutions.

    Each level is a 1×1 convolution of its map plus the upsampled coarser level, then a 3×3 convolution.
    """

    def __init__(self, channels: Sequence[int], *, dim: int = 256) -> None:
        super().__init__()
        self.dim = dim
        self.laterals = nn.ModuleList(nn.Conv2d(c, dim, 1) for c in channels)
        self.outputs = nn.ModuleList(nn.Conv2d(dim, dim, 3, padding=1) for _ in channels)
        for conv in (*self.laterals, *self.outputs):
            nn.init.kaiming_uniform_(conv.weight, a=1)  # no ReLU follows
            nn.init.zeros_(conv.bias)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        levels = [lateral(x) for lateral, x in zip(self.laterals, maps, strict=True)]
        for i in range(len(levels) - 2, -1, -1):  # from coarse to fine
            levels[i] = levels[i] + F.interpolate(levels[i + 1], size=levels[i].shape[2:])
        return [output(x) for output, x in zip(self.outputs, levels, strict=True)]


class SemanticHead(nn.Module):
    """Upsample every level to the finest resolution in steps of 2, sum the levels, classify each position."""

    def __init__(self, dim: int, strides: Sequence[int], classes: int, *, width: int = 128) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(dim, width, round(math.log2(s / strides[0]))) for s in strides)
        self.classify = nn.Conv2d(width, classes, 1)
        nn.init.normal_(self.classify.weight, std=0.01)

    def forward(self, levels: Sequence[Tensor]) -> Tensor:
        """Return logits ``(B, classes, H, W)`` at the resolution of the finest level."""
        finest, *coarser = (
            branch(x, levels[0].shape[2:]) for branch, x in zip(self.branches, levels, strict=True)
        )
        return self.classify(sum(coarser, finest))


class Branch(nn.Module):
    """Upsample one level to ``size``, which is 2^``doublings`` times as large.

    Each doubling is a 3×3 convolution, GroupNorm, ReLU and bilinear upsampling. A level that has the size
    already is convolved once.
    """

    def __init__(self, dim_in: int, dim: int, doublings: int) -> None:
        super().__init__()
        self.steps = nn.ModuleList(_step(dim if i else dim_in, dim) for i in range(max(1, doublings)))

    def forward(self, x: Tensor, size: Sequence[int]) -> Tensor:
        for i, step in enumerate(self.steps, start=1):
            left = 2 ** (len(self.steps) - i)
            x = resize(step(x), [-(-side // left) for side in size])
        return x


def _step(dim_in: int, dim: int) -> nn.Sequential:
    conv = nn.Conv2d(dim_in, dim, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    divides = dim % MIN_GROUP_CHANNELS == 0
    groups = math.gcd(MAX_GROUPS, dim // MIN_GROUP_CHANNELS) if divides else 1
    return nn.Sequential(conv, nn.GroupNorm(groups, dim), nn.ReLU(inplace=True))


def resize(x: Tensor, size: Sequence[int]) -> Tensor:
    """Resize ``x (B, C, H, W)`` bilinearly to ``size`` (H, W)."""
    if x.shape[2:] == tuple(size):
        return x
    return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)


class VTFPN(nn.Module):
    """The feature pyramid of Visual Transformers (Sec. 4, Figure 4): levels exchange tokens.

    Each level of ``channels`` becomes ``tokens`` tokens (Eq. 1), one transformer mixes the tokens of all
    levels (Eq. 3, 4), and each level, projected to ``dim`` channels, attends to all of them (Eq. 5). No level
    is upsampled and no 3×3 convolution runs over pixels.
    """

    def __init__(
        self,
        channels: Sequence[int],
        *,
        dim: int = 256,
        tokens: int = 8,
        token_dim: int = 1024,
        attn_dim: int = 512,
        groups: int = 2,
        hidden: int = 1024,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.tokenizers = nn.ModuleList(
            FilterTokenizer(c, tokens=tokens, token_dim=token_dim, value=True) for c in channels
        )
        self.mixer = TokenTransformer(token_dim, hidden=hidden, attn_dim=attn_dim, groups=groups)
        self.projectors = nn.ModuleList(Projector(c, dim, token_dim=token_dim) for c in channels)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        maps = [channels_last(x) for x in maps]  # so that (B, N, C) is a view
        tokens = [tokenizer(x) for tokenizer, x in zip(self.tokenizers, maps, strict=True)]  # (B, K, CT)
        mixed = self.mixer(torch.cat(tokens, dim=1))  # (B, levels·K, CT)
        return [projector(x, mixed) for projector, x in zip(self.projectors, maps, strict=True)]


POOLS = (1, 2, 3, 6)  # sides of the grids to which UperNet averages the coarsest map


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm that can train on one value per channel, which pooling gives for a single image.

    One value has no variance, so it is normalised by the running statistics.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.numel() == x.shape[1]:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(x)


class ConvNormReLU(nn.Sequential):
    """Same-size convolution, BatchNorm, ReLU."""

    def __init__(self, dim_in: int, dim: int, kernel: int) -> None:
        conv = nn.Conv2d(dim_in, dim, kernel, padding=kernel // 2, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        super().__init__(conv, BatchNorm(dim), nn.ReLU(inplace=True))


class PyramidPooling(nn.Module):
    """Concatenate a map with its averages over 1×1, 2×2, 3×3 and 6×6 grids, then convolve 3×3."""

    def __init__(self, dim_in: int, dim: int) -> None:
        super().__init__()
        self.pools = nn.ModuleList(ConvNormReLU(dim_in, dim, 1) for _ in POOLS)
        self.merge = ConvNormReLU(dim_in + len(POOLS) * dim, dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        means = (conv(F.adaptive_avg_pool2d(x, side)) for conv, side in zip(self.pools, POOLS, strict=True))
        return self.merge(torch.cat([x, *(resize(mean, x.shape[2:]) for mean in means)], dim=1))


class UperNet(nn.Module):
    """Maps of ``channels`` to logits ``(B, classes, H, W)`` at the resolution of the finest map.

    Pyramid pooling on the coarsest map, then a feature pyramid whose levels are concatenated.
    """

    def __init__(
        self, channels: Sequence[int], classes: int, *, dim: int = 512, dropout: float = 0.1
    ) -> None:
        super().__init__()
        *finer, coarsest = channels
        self.laterals = nn.ModuleList(ConvNormReLU(c, dim, 1) for c in finer)
        self.pooling = PyramidPooling(coarsest, dim)
        self.outputs = nn.ModuleList(ConvNormReLU(dim, dim, 3) for _ in finer)
        self.fuse = ConvNormReLU(len(channels) * dim, dim, 3)
        self.dropout = nn.Dropout2d(dropout)
        self.classify = nn.Conv2d(dim, classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        *finer, coarsest = maps
        levels = [lateral(x) for lateral, x in zip(self.laterals, finer, strict=True)]
        levels.append(self.pooling(coarsest))
        for i in range(len(levels) - 2, -1, -1):  # from coarse to fine
            levels[i] = levels[i] + resize(levels[i + 1], levels[i].shape[2:])
        refined = [output(x) for output, x in zip(self.outputs, levels[:-1], strict=True)]
        size = levels[0].shape[2:]
        fused = self.fuse(torch.cat([resize(x, size) for x in (*refined, levels[-1])], dim=1))
        return self.classify(self.dropout(fused))


class AuxiliaryHead(nn.Module):
    """A small classifier of one map that shortens the gradient path to the backbone."""

    def __init__(self, dim_in: int, classes: int, *, dim: int = 256, dropout: float = 0.1) -> None:
        super().__init__()
        self.conv = ConvNormReLU(dim_in, dim, 3)
        self.dropout = nn.Dropout2d(dropout)
        self.classify = nn.Conv2d(dim, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.dropout(self.conv(x)))
