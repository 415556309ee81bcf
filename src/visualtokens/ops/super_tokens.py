"""STViT's sparse association: every token belongs to the 3×3 super tokens around it (supplement, Algo. 1).

A map of H×W tokens is cut into p×q cells of h×w tokens, each with one super token. Tokens are kept by
cell, ``(B, K, T, C)`` with K = p·q and T = h·w; an association is ``(B, K, T, 9)``, over the cell's own
super token (the middle one) and its eight neighbours, row by row. Nothing of size N×K is ever made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from visualtokens.ops.checks import check_finite

Border = Literal["released", "exact"]


@dataclass(frozen=True)
class Cells:
    """How a grid is cut: ``grid (H, W)`` tokens in ``count (p, q)`` cells of ``cell (h, w)`` tokens."""

    grid: tuple[int, int]
    cell: tuple[int, int]

    def __post_init__(self) -> None:
        if min(self.grid + self.cell) < 1:
            raise ValueError(f"grid={self.grid} cannot be cut into cells of {self.cell}; give at least 1×1")

    @property
    def count(self) -> tuple[int, int]:
        return -(-self.grid[0] // self.cell[0]), -(-self.grid[1] // self.cell[1])

    @property
    def padding(self) -> tuple[int, int]:
        """Rows and columns added at the bottom and right so that the cells divide the grid."""
        p, q = self.count
        return p * self.cell[0] - self.grid[0], q * self.cell[1] - self.grid[1]


def super_token_association(
    x: Tensor, cells: Cells, *, n_iter: int = 1, border: Border = "exact", eps: float = 1e-12
) -> Tensor:
    """Eq. 1: Q = softmax over the 3×3 neighbours of x·s / √C, ``(B, K, T, 9)``, without gradient.

    ``x (B, N, C)`` are the tokens. The super tokens start as the means of their cells; between two of the
    ``n_iter`` rounds they move to the association's weighted means (Eq. 2).

    ``border="released"`` is what the released models do: neighbours outside the map take part in the
    softmax as zero vectors, and so do the zeros that fill up cut cells. ``border="exact"`` gives both no
    weight, so that a constant map comes back unchanged.
    """
    check_finite("super_token_association", x=x)
    if n_iter < 1:
        raise ValueError(f"n_iter={n_iter}; at least one round is needed to associate anything")
    if border not in ("released", "exact"):
        raise ValueError(f"border={border!r} is neither 'released' nor 'exact'")
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        x = x if x.dtype == torch.float64 else x.float()
        tokens = to_cells(x, cells)  # (B, K, T, C)
        inside = _inside(cells, x.device) if border == "exact" else None  # (K, T), (K, 9)
        supers = _cell_means(tokens, None if inside is None else inside[0])  # (B, K, C)
        for i in range(n_iter):
            logits = tokens @ neighbours(supers, cells.count).mT * x.shape[2] ** -0.5  # (B, K, T, 9)
            if inside is not None:
                logits = logits.masked_fill(~inside[1].unsqueeze(1), -torch.inf)
            association = logits.softmax(3)
            if inside is not None:
                association = association * inside[0].unsqueeze(2)
            if i + 1 < n_iter:
                supers = _weighted_means(tokens, association, cells, eps)
    return association


def super_token_gather(x: Tensor, association: Tensor, cells: Cells, *, eps: float = 1e-12) -> Tensor:
    """Eq. 2: S = Q̂ᵀ X, each super token the association's weighted mean: ``(B, N, C)`` to ``(B, K, C)``."""
    check_finite("super_token_gather", x=x, association=association)
    with torch.autocast(x.device.type, enabled=False):
        tokens = to_cells(x.to(association.dtype), cells)
        return _weighted_means(tokens, association, cells, eps).to(x.dtype)


def super_token_scatter(supers: Tensor, association: Tensor, cells: Cells) -> Tensor:
    """X = Q S: every token gets its share of the super tokens around it, ``(B, K, C)`` to ``(B, N, C)``."""
    check_finite("super_token_scatter", supers=supers, association=association)
    with torch.autocast(supers.device.type, enabled=False):
        around = neighbours(supers.to(association.dtype), cells.count)  # (B, K, 9, C)
        return from_cells(association @ around, cells).to(supers.dtype)


def to_cells(x: Tensor, cells: Cells) -> Tensor:
    """``(B, N, C)`` to ``(B, K, T, C)``, cut cells filled up with zeros at the bottom and right."""
    (p, q), (h, w), (bottom, right) = cells.count, cells.cell, cells.padding
    b, n, c = x.shape
    if n != cells.grid[0] * cells.grid[1]:
        raise ValueError(f"x has {n} tokens, but the grid {cells.grid} has {cells.grid[0] * cells.grid[1]}")
    x = x.unflatten(1, cells.grid)  # (B, H, W, C)
    if bottom or right:
        x = F.pad(x, (0, 0, 0, right, 0, bottom))
    return x.reshape(b, p, h, q, w, c).transpose(2, 3).reshape(b, p * q, h * w, c)


def from_cells(x: Tensor, cells: Cells) -> Tensor:
    """``(B, K, T, C)`` to ``(B, N, C)``: the way back of :func:`to_cells`, the filling cut off."""
    (p, q), (h, w) = cells.count, cells.cell
    b, _, _, c = x.shape
    x = x.reshape(b, p, q, h, w, c).transpose(2, 3).reshape(b, p * h, q * w, c)
    return x[:, : cells.grid[0], : cells.grid[1]].flatten(1, 2)


def neighbours(supers: Tensor, count: tuple[int, int]) -> Tensor:
    """The 3×3 super tokens around each: ``(B, K, C)`` to ``(B, K, 9, C)``, zeros outside the map."""
    p, q = count
    padded = F.pad(supers.unflatten(1, count), (0, 0, 1, 1, 1, 1))  # (B, p + 2, q + 2, C)
    around = [padded[:, dy : dy + p, dx : dx + q] for dy in range(3) for dx in range(3)]
    return torch.stack(around, dim=3).flatten(1, 2)


def add_to_neighbours(parts: Tensor, count: tuple[int, int]) -> Tensor:
    """The transpose of :func:`neighbours`: ``(B, K, 9, C)`` summed into ``(B, K, C)``; outside is lost."""
    p, q = count
    parts = parts.unflatten(1, count)  # (B, p, q, 9, C)
    total = parts.new_zeros(parts.shape[0], p + 2, q + 2, parts.shape[4])
    for i in range(9):
        dy, dx = divmod(i, 3)
        # the part of cell (y, x) for its neighbour (y + dy − 1, x + dx − 1), in padded coordinates
        total = total + F.pad(parts[:, :, :, i], (0, 0, dx, 2 - dx, dy, 2 - dy))
    return total[:, 1:-1, 1:-1].flatten(1, 2)


def _weighted_means(tokens: Tensor, association: Tensor, cells: Cells, eps: float) -> Tensor:
    total = add_to_neighbours(association.sum(2).unsqueeze(3), cells.count)  # (B, K, 1)
    return add_to_neighbours(association.mT @ tokens, cells.count) / (total + eps)  # (B, K, C)


def _cell_means(tokens: Tensor, inside: Tensor | None) -> Tensor:
    if inside is None:
        return tokens.mean(2)
    return tokens.sum(2) / inside.sum(1).unsqueeze(1)  # the filling is zero and adds nothing


def _inside(cells: Cells, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which tokens ``(K, T)`` and which neighbours ``(K, 9)`` lie on the map."""
    n = cells.grid[0] * cells.grid[1]
    tokens = to_cells(torch.ones(1, n, 1, dtype=torch.bool, device=device), cells)
    k = cells.count[0] * cells.count[1]
    around = neighbours(torch.ones(1, k, 1, dtype=torch.bool, device=device), cells.count)
    return tokens[0, :, :, 0], around[0, :, :, 0]
