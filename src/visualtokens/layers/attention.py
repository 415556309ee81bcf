"""Multi-head self-attention, and super token attention (STViT, Algo. 1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.errors import UserError
from visualtokens.grouping import Tap
from visualtokens.layers.convolutions import to_map, to_tokens
from visualtokens.ops import attend, join_heads
from visualtokens.ops.super_tokens import (
    Border,
    Cells,
    add_to_neighbours,
    associate,
    from_cells,
    gather_cells,
    neighbour_index,
    scatter_cells,
    to_cells,
)


class SuperTokenAttention(nn.Module):
    """STViT Algo. 1 on ``(B, C, H, W)``: sample super tokens, attend among them, upsample to all tokens.

    Each ``cell`` of h×w tokens has one super token. Each token is associated with the nine super tokens
    around it, in ``n_iter`` rounds, or with its own only if that is 0; see
    :func:`~visualtokens.ops.super_token_association`, also for ``border``. Grids of any size work; cells at
    the border may be cut. ``cell=(1, 1)`` is plain self-attention. ``window`` is the grid of super tokens for
    which a relative position bias is learned.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        cell: tuple[int, int] = (8, 8),
        n_iter: int = 1,
        border: Border = "exact",
        window: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        if min(cell) < 1:
            raise UserError(f"cell={cell}; give at least (1, 1)")
        if n_iter < 0:
            raise UserError(f"n_iter={n_iter}; give 0 or more")
        if border not in ("released", "exact"):
            raise UserError(f"border={border!r} is neither 'released' nor 'exact'")
        self.cell, self.n_iter, self.border = cell, n_iter, border
        self.mix = SelfAttention(dim, heads=heads, window=window)
        self.tap = Tap() if self.samples else None

    @property
    def samples(self) -> bool:
        """Whether super tokens are sampled; False for plain self-attention."""
        return self.cell != (1, 1)

    def forward(self, x: Tensor) -> Tensor:
        grid = (x.shape[2], x.shape[3])
        tokens = to_tokens(x)  # (B, N, C)
        if self.tap is None:
            return to_map(self.mix(tokens, grid), grid)
        cells = Cells(grid, self.cell)
        by_cell = to_cells(tokens, cells)  # (B, K, T, C)
        association = associate(by_cell, cells, n_iter=self.n_iter, border=self.border)  # (B, K, T, 9)
        if self.tap.wanted():
            _record(self.tap, association, cells)
        supers = self.mix(gather_cells(by_cell, association, cells), cells.count)  # (B, K, C)
        return to_map(from_cells(scatter_cells(supers, association, cells), cells), grid)

    def extra_repr(self) -> str:
        return f"cell={self.cell}, n_iter={self.n_iter}, border={self.border!r}"


def _record(tap: Tap, association: Tensor, cells: Cells) -> None:
    """Passes ``association (B, K, T, 9)`` to the tap in sparse form.

    The size of a super token is the effective number of its tokens, (Σw)² / Σw².
    """
    weights = from_cells(association, cells)  # (B, N, 9)
    index = neighbour_index(cells, device=weights.device)  # (N, 9)
    by_cell = to_cells(weights, cells)  # (B, K, T, 9), now with zero weight for padding
    total = add_to_neighbours(by_cell.sum(2).unsqueeze(3), cells.count).squeeze(2)  # (B, K)
    squares = add_to_neighbours(by_cell.square().sum(2).unsqueeze(3), cells.count).squeeze(2)
    size = total.square() / squares.clamp_min(torch.finfo(squares.dtype).tiny)
    tap(weights, cells.grid, size, index.expand(weights.shape[0], -1, -1))


class SelfAttention(nn.Module):
    """softmax(q kᵀ · D^-0.5 + bias) v on ``(B, N, C)``, then a projection.

    The channels of ``qkv`` are ordered by head, as in STViT: q, k and v of the first head, then of the
    second. ``window`` is the grid (H, W) for which a relative position bias is learned; None for no bias.
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
    """Swin's relative position bias: one learned value per head and offset between two tokens of a grid.

    For a grid other than ``window`` the table is interpolated.
    """

    def __init__(self, heads: int, window: tuple[int, int]) -> None:
        super().__init__()
        self.window = window
        self.table = nn.Parameter(torch.empty(heads, 2 * window[0] - 1, 2 * window[1] - 1))
        nn.init.trunc_normal_(self.table, std=0.02)

    def set_window(self, window: tuple[int, int]) -> None:
        """Interpolates the table for another window; the bias for a grid of that size does not change."""
        table = resize_positions(self.table.detach(), window).clone()
        self.table = nn.Parameter(table, requires_grad=self.table.requires_grad)
        self.window = window

    def forward(self, grid: tuple[int, int]) -> Tensor:
        """Returns the bias ``(heads, N, N)`` for the N = H·W tokens of the grid."""
        height, width = grid
        table = resize_positions(self.table, grid)
        # A query at y has its key y' at offset y - y': a window that slides backwards over the table.
        offsets = table.flip(1, 2).unfold(1, height, 1).unfold(2, width, 1)  # (heads, H, W, H, W)
        return offsets.flip(1, 2).flatten(3, 4).flatten(1, 2)


def resize_positions(table: Tensor, window: tuple[int, int]) -> Tensor:
    """Interpolates the values of all offsets in a window for a window (H, W): ``(heads, 2H - 1, 2W - 1)``."""
    size = (2 * window[0] - 1, 2 * window[1] - 1)
    if table.shape[1:] == size:
        return table
    return F.interpolate(table.unsqueeze(0), size, mode="bicubic", align_corners=True).squeeze(0)
