"""Panoptic FPN's semantic branch: a feature pyramid, and the head that reads all of its levels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

GROUPS = 32  # of GroupNorm in the head, at most
LEAST = 4  # channels in such a group: one channel of a single pixel has no variance


class FPN(nn.Module):
    """The feature pyramid: maps of ``channels`` to maps of ``dim`` channels at the same resolutions.

    Each level is a 1×1 convolution of its map plus the coarser level, enlarged; then a 3×3 convolution.
    """

    def __init__(self, channels: Sequence[int], *, dim: int = 256) -> None:
        super().__init__()
        self.dim = dim
        self.laterals = nn.ModuleList(nn.Conv2d(c, dim, 1) for c in channels)
        self.outputs = nn.ModuleList(nn.Conv2d(dim, dim, 3, padding=1) for _ in channels)
        for conv in (*self.laterals, *self.outputs):
            nn.init.kaiming_uniform_(conv.weight, a=1)  # there is no ReLU behind it
            nn.init.zeros_(conv.bias)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        levels = [lateral(x) for lateral, x in zip(self.laterals, maps, strict=True)]
        for i in range(len(levels) - 2, -1, -1):  # from coarse to fine
            levels[i] = levels[i] + F.interpolate(levels[i + 1], size=levels[i].shape[2:])
        return [output(x) for output, x in zip(self.outputs, levels, strict=True)]


class SemanticHead(nn.Module):
    """Bring every level to the finest resolution in steps of 2, add them up, and classify each place."""

    def __init__(self, dim: int, strides: Sequence[int], classes: int, *, width: int = 128) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(dim, width, round(math.log2(s / strides[0]))) for s in strides)
        self.classify = nn.Conv2d(width, classes, 1)
        nn.init.normal_(self.classify.weight, std=0.01)

    def forward(self, levels: Sequence[Tensor]) -> Tensor:
        """Logits ``(B, classes, H, W)`` at the resolution of the finest level."""
        finest, *coarser = (
            branch(x, levels[0].shape[2:]) for branch, x in zip(self.branches, levels, strict=True)
        )
        return self.classify(sum(coarser, finest))


class Branch(nn.Module):
    """One level on its way to ``size``, which is 2^``doublings`` times as large.

    Each doubling is a 3×3 convolution, GroupNorm, ReLU and bilinear enlargement. A level that has that
    size already is convolved once.
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
    groups = math.gcd(GROUPS, dim // LEAST) if dim % LEAST == 0 else 1
    return nn.Sequential(conv, nn.GroupNorm(groups, dim), nn.ReLU(inplace=True))


def resize(x: Tensor, size: Sequence[int]) -> Tensor:
    """``(B, C, H, W)`` at another ``size`` (H, W), bilinearly."""
    if x.shape[2:] == tuple(size):
        return x
    return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)
