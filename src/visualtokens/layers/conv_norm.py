"""1×1 convolutions of pixels and of tokens, each without bias and followed by its own BatchNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.errors import UserError


def pixel_groups(channels: int, *, width: int = 64) -> int:
    """The most groups of at least ``width`` channels: C / 64 where that is whole, 1 below 128 channels."""
    return next(g for g in range(max(1, channels // width), 0, -1) if channels % g == 0)


class PixelConv(nn.Module):
    """``(B, C_in, H, W)`` to ``(B, C, H, W)``: a 1×1 convolution, then BatchNorm."""

    def __init__(self, dim_in: int, dim: int, *, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim_in, dim, 1, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(dim)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


def normalise_tokens(norm: nn.Module, tokens: Tensor) -> Tensor:
    """BatchNorm of tokens ``(B, L, C)``: one mean and variance per channel, over images and tokens.

    A function of a plain ``nn.BatchNorm1d``, so that what looks for BatchNorms finds one (SyncBatchNorm).
    """
    return norm(tokens.flatten(0, 1)).unflatten(0, tokens.shape[:2])


class TokenConv(nn.Module):
    """``(B, L, C_in)`` to ``(B, L, C)``: a 1×1 convolution over tokens, then BatchNorm.

    The same as ``nn.Conv1d`` on ``(B, C_in, L)``, without turning the tokens around and back.
    ``zero_init`` starts the BatchNorm's weight at zero, so that a residual branch starts as nothing.
    """

    def __init__(self, dim_in: int, dim: int, *, groups: int = 1, zero_init: bool = False) -> None:
        super().__init__()
        if dim_in % groups or dim % groups:
            raise UserError(f"groups={groups} does not divide {dim_in} and {dim} channels; give a divisor")
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(dim, dim_in // groups))
        self.norm = nn.BatchNorm1d(dim)
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        if zero_init:
            nn.init.zeros_(self.norm.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.groups == 1:
            return normalise_tokens(self.norm, F.linear(tokens, self.weight))
        parts = tokens.unflatten(2, (self.groups, -1))  # (B, L, groups, C_in / groups)
        weight = self.weight.unflatten(0, (self.groups, -1))  # (groups, C / groups, C_in / groups)
        out = torch.einsum("blgi,goi->blgo", parts, weight).flatten(2)  # (B, L, C)
        return normalise_tokens(self.norm, out)

    def extra_repr(self) -> str:
        dim, part = self.weight.shape
        return f"{part * self.groups}, {dim}, groups={self.groups}"
