"""Multi-head self-attention of the tokens of a grid, as STViT has it between its super tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.errors import UserError
from visualtokens.ops import attend, join_heads


class SelfAttention(nn.Module):
    """softmax(q kᵀ · D^-0.5 + bias) v on ``(B, N, C)``, then a projection.

    The channels of ``qkv`` are q, k and v of the first head, then of the second, and so on, as in STViT.
    ``window``: the grid (H, W) for which to learn a bias by relative position; None has no bias.
    """

    def __init__(self, dim: int, *, heads: int, window: tuple[int, int] | None = None) -> None:
        super().__init__()
        if dim % heads:
            raise UserError(f"dim={dim} cannot be split over heads={heads}; give a divisor of {dim}")
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.position = None if window is None else RelativePosition(heads, window)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        qkv = self.qkv(x).unflatten(2, (self.heads, 3, -1))  # (B, N, heads, 3, D)
        q, k, v = qkv.transpose(1, 2).unbind(3)  # (B, heads, N, D)
        bias = None if self.position is None else self.position(grid).to(q.dtype)
        return self.proj(join_heads(attend(q, k, v, bias)))


class RelativePosition(nn.Module):
    """Swin's bias: one learned value per head and per offset between two tokens of a grid.

    On another grid than the ``window`` it was made for, the table is interpolated.
    """

    def __init__(self, heads: int, window: tuple[int, int]) -> None:
        super().__init__()
        self.window = window
        self.table = nn.Parameter(torch.empty(heads, 2 * window[0] - 1, 2 * window[1] - 1))
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, grid: tuple[int, int]) -> Tensor:
        """``(heads, N, N)`` for the N = H·W tokens of the grid."""
        height, width = grid
        table: Tensor = self.table
        if grid != self.window:
            size = (2 * height - 1, 2 * width - 1)
            table = F.interpolate(table.unsqueeze(0), size, mode="bicubic", align_corners=True).squeeze(0)
        # Token y sees token y' at offset y - y': as a window that slides over the table backwards.
        offsets = table.flip(1, 2).unfold(1, height, 1).unfold(2, width, 1)  # (heads, H, W, H, W)
        return offsets.flip(1, 2).flatten(3, 4).flatten(1, 2)
