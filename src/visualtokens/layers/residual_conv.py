"""A depth-wise convolution that adds its input."""

from __future__ import annotations

from torch import Tensor, nn


class ResidualConv(nn.Conv2d):
    """x + conv(x), 3×3 and depth-wise, on ``(B, C, H, W)``: STViT's conditional position encoding."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.add_(x) if y.dtype == x.dtype else x + y  # in place; autocast may have changed its type
