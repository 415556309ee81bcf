"""UperNet: pyramid pooling on the coarsest map, then a feature pyramid whose levels are read together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.tasks.segment.fpn import resize

POOLS = (1, 2, 3, 6)  # sides of the grids that the coarsest map is averaged to


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm that also learns from one value per channel, as pooling leaves of a single image.

    One value has no variance, so it is normalised by the running one.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.numel() == x.shape[1]:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(x)


class ConvNormReLU(nn.Sequential):
    """A convolution that keeps the size, BatchNorm, ReLU."""

    def __init__(self, dim_in: int, dim: int, kernel: int) -> None:
        conv = nn.Conv2d(dim_in, dim, kernel, padding=kernel // 2, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        super().__init__(conv, BatchNorm(dim), nn.ReLU(inplace=True))


class PyramidPooling(nn.Module):
    """The map beside its own averages over 1×1, 2×2, 3×3 and 6×6 cells, merged by a 3×3 convolution."""

    def __init__(self, dim_in: int, dim: int) -> None:
        super().__init__()
        self.pools = nn.ModuleList(ConvNormReLU(dim_in, dim, 1) for _ in POOLS)
        self.merge = ConvNormReLU(dim_in + len(POOLS) * dim, dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        means = (conv(F.adaptive_avg_pool2d(x, side)) for conv, side in zip(self.pools, POOLS, strict=True))
        return self.merge(torch.cat([x, *(resize(mean, x.shape[2:]) for mean in means)], dim=1))


class UperNet(nn.Module):
    """Maps of ``channels`` to logits ``(B, classes, H, W)`` at the resolution of the finest map."""

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
        read = [output(x) for output, x in zip(self.outputs, levels[:-1], strict=True)]
        size = levels[0].shape[2:]
        fused = self.fuse(torch.cat([resize(x, size) for x in (*read, levels[-1])], dim=1))
        return self.classify(self.dropout(fused))


class AuxiliaryHead(nn.Module):
    """A small classifier of one map, which gives the backbone a shorter way to learn from."""

    def __init__(self, dim_in: int, classes: int, *, dim: int = 256, dropout: float = 0.1) -> None:
        super().__init__()
        self.conv = ConvNormReLU(dim_in, dim, 3)
        self.dropout = nn.Dropout2d(dropout)
        self.classify = nn.Conv2d(dim, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.dropout(self.conv(x)))
