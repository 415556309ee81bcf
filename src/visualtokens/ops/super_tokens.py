"""STViT's sparse association: each token belongs to the 3×3 super tokens around it (supplement, Algo. 1).

A map of H×W tokens is split into p×q cells of h×w tokens, each with one super token. Tokens are stored by
cell, ``(B, K, T, C)`` with K = p·q and T = h·w. An association is ``(B, K, T, 9)``: the weights of the
cell's own super token (in the middle) and its eight neighbours, row by row. No tensor of size N×K is made.

:func:`super_token_association`, :func:`super_token_gather` and :func:`super_token_scatter` take tokens as a
sequence. :func:`associate`, :func:`gather_cells` and :func:`scatter_cells` are the same on cells; a layer
that calls all three converts to cells only once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from visualtokens.ops.numerics import check_finite, no_autocast, upcast

Border = Literal["released", "exact"]
EPS = 1e-12


@dataclass(frozen=True)
class Cells:
    """Split of a grid: ``grid (H, W)`` tokens in ``count (p, q)`` cells of ``cell (h, w)`` tokens."""

    grid: tuple[int, int]
    cell: tuple[int, int]

    def __post_init__(self) -> None:
        if min(self.grid + self.cell) < 1:
            raise ValueError(f"grid={self.grid} cannot be split into cells of {self.cell}; give at least 1×1")

    @property
    def count(self) -> tuple[int, int]:
        return -(-self.grid[0] // self.cell[0]), -(-self.grid[1] // self.cell[1])

    @property
    def padding(self) -> tuple[int, int]:
        """Rows added at the bottom and columns added at the right, so that the cells divide the grid."""
        p, q = self.count
        return p * self.cell[0] - self.grid[0], q * self.cell[1] - self.grid[1]


def super_token_association(
    x: Tensor, cells: Cells, *, n_iter: int = 1, border: Border = "exact", eps: float = EPS
) -> Tensor:
    """Eq. 1: Q = softmax over the 3×3 neighbours of x·s / √C, ``(B, K, T, 9)``, without gradient.

    ``x (B, N, C)`` are the tokens. The super tokens start as the means of their cells; between two of the
    ``n_iter`` rounds they are updated to the weighted means of the association (Eq. 2). Without a round
    (``n_iter=0``) each token belongs to its own cell, whatever it shows: average pooling over a grid.

    ``border="released"`` matches the released models: neighbours outside the map take part in the softmax
    as zero vectors, and so does the zero padding of incomplete cells. ``border="exact"`` gives both zero
    weight, so that gather and scatter leave a constant map unchanged.
    """
    check_finite("super_token_association", x=x)  # here, where an index still names the token
    return associate(to_cells(x, cells), cells, n_iter=n_iter, border=border, eps=eps)


def super_token_gather(x: Tensor, association: Tensor, cells: Cells, *, eps: float = EPS) -> Tensor:
    """Eq. 2: S = Q̂ᵀ X, the weighted means of ``x (B, N, C)`` by the association: ``(B, K, C)``."""
    check_finite("super_token_gather", x=x, association=association)
    return gather_cells(to_cells(x, cells), association, cells, eps=eps)


def super_token_scatter(supers: Tensor, association: Tensor, cells: Cells) -> Tensor:
    """X = Q S: each token is a weighted sum of its super tokens, ``(B, K, C)`` to ``(B, N, C)``."""
    return from_cells(scatter_cells(supers, association, cells), cells)


def associate(
    tokens: Tensor, cells: Cells, *, n_iter: int = 1, border: Border = "exact", eps: float = EPS
) -> Tensor:
    """:func:`super_token_association` on cells: ``(B, K, T, C)`` to ``(B, K, T, 9)``."""
    check_finite("super_token_association", x=tokens)
    if n_iter < 0:
        raise ValueError(f"n_iter={n_iter}; give 0 or more")
    if border not in ("released", "exact"):
        raise ValueError(f"border={border!r} is neither 'released' nor 'exact'")
    with torch.no_grad(), no_autocast(tokens):
        tokens = upcast(tokens)
        exact = border == "exact"
        present = _present(cells, tokens) if exact and any(cells.padding) else None  # (K, 1, T)
        if n_iter == 0:
            return _own_cell(tokens, present)
        penalty = _penalty(cells, tokens) if exact else None  # (K, 9, 1)
        supers = _cell_means(tokens, present)
        association = _softmax(supers, tokens, cells, penalty, present)
        for _ in range(n_iter - 1):
            supers = _weighted_means(tokens, association, cells, eps)
            association = _softmax(supers, tokens, cells, penalty, present)
    return association


def gather_cells(tokens: Tensor, association: Tensor, cells: Cells, *, eps: float = EPS) -> Tensor:
    """:func:`super_token_gather` on cells: ``(B, K, T, C)`` to ``(B, K, C)``."""
    check_finite("super_token_gather", x=tokens, association=association)
    with no_autocast(tokens):
        return _weighted_means(tokens.to(association.dtype), association, cells, eps).to(tokens.dtype)


def scatter_cells(supers: Tensor, association: Tensor, cells: Cells) -> Tensor:
    """:func:`super_token_scatter` on cells: ``(B, K, C)`` to ``(B, K, T, C)``."""
    check_finite("super_token_scatter", supers=supers, association=association)
    with no_autocast(supers):
        return (association @ neighbours(supers.to(association.dtype), cells.count)).to(supers.dtype)


def to_cells(x: Tensor, cells: Cells) -> Tensor:
    """``(B, N, C)`` to ``(B, K, T, C)``; incomplete cells are padded with zeros at the bottom and right."""
    (p, q), (h, w), (bottom, right) = cells.count, cells.cell, cells.padding
    b, n, c = x.shape
    if n != cells.grid[0] * cells.grid[1]:
        raise ValueError(f"x has {n} tokens, but the grid {cells.grid} has {cells.grid[0] * cells.grid[1]}")
    x = x.unflatten(1, cells.grid)  # (B, H, W, C)
    if bottom or right:
        x = F.pad(x, (0, 0, 0, right, 0, bottom))
    by_cell = x.reshape(b, p, h, q, w, c).transpose(2, 3).reshape(b, p * q, h * w, c)
    # Pins the memory layout; the layout that inductor chooses on its own is slower.
    return by_cell.as_strided(by_cell.shape, by_cell.stride()) if torch.compiler.is_compiling() else by_cell


def from_cells(x: Tensor, cells: Cells) -> Tensor:
    """``(B, K, T, C)`` to ``(B, N, C)`` without padding: the inverse of :func:`to_cells`."""
    (p, q), (h, w) = cells.count, cells.cell
    b, _, _, c = x.shape
    x = x.reshape(b, p, q, h, w, c).transpose(2, 3).reshape(b, p * h, q * w, c)
    return x[:, : cells.grid[0], : cells.grid[1]].flatten(1, 2)


def neighbours(supers: Tensor, count: tuple[int, int]) -> Tensor:
    """The 3×3 super tokens around each cell: ``(B, K, C)`` to ``(B, K, 9, C)``, zeros outside the map."""
    padded = F.pad(supers.unflatten(1, count), (0, 0, 1, 1, 1, 1))  # (B, p + 2, q + 2, C)
    around = padded.unfold(1, 3, 1).unfold(2, 3, 1)  # (B, p, q, C, 3, 3), a view
    return around.permute(0, 1, 2, 4, 5, 3).flatten(3, 4).flatten(1, 2)


def add_to_neighbours(parts: Tensor, count: tuple[int, int]) -> Tensor:
    """The transpose of :func:`neighbours`: ``(B, K, 9, C)`` summed into ``(B, K, C)``."""
    (p, q), (b, _, _, c) = count, parts.shape
    padded = F.pad(parts.unflatten(1, count), (0, 0, 0, 0, 1, 1, 1, 1))  # (B, p + 2, q + 2, 9, C)
    # For the neighbour at (dy, dx), 0 to 2 each, this super token is number 8 - 3·dy - dx, on the opposite
    # side. So the nine parts of a super token lie at constant strides in memory.
    image, row, column = (p + 2) * (q + 2) * 9 * c, (q + 2) * 9 * c, 9 * c
    strides = (image, row, column, row - 3 * c, column - c, 1)
    received = padded.as_strided((b, p, q, 3, 3, c), strides, 8 * c)
    return received.sum(3).sum(3).flatten(1, 2)  # sum((3, 4)) takes four times as long


def neighbour_index(cells: Cells, *, device: torch.device | str | None = None) -> Tensor:
    """``(N, 9)``: the indices of the super tokens around each token, -1 outside the map."""
    (p, q), (h, w) = cells.count, cells.cell
    numbers = torch.arange(1, p * q + 1, device=device).view(1, p * q, 1)
    around = neighbours(numbers, cells.count) - 1  # (1, K, 9, 1)
    return from_cells(around.mT.expand(1, p * q, h * w, 9), cells)[0]


def _softmax(
    supers: Tensor, tokens: Tensor, cells: Cells, penalty: Tensor | None, present: Tensor | None
) -> Tensor:
    """Eq. 1 for ``supers (B, K, C)``: ``(B, K, T, 9)``, a transposed view of ``(B, K, 9, T)``.

    ``penalty (K, 9, 1)`` is added to the logits; ``present (K, 1, T)`` masks padded tokens.
    """
    b, k, t, c = tokens.shape
    around = neighbours(supers * c**-0.5, cells.count).flatten(0, 1)  # (B·K, 9, C)
    by_channel = tokens.flatten(0, 1).mT  # (B·K, C, T)
    if penalty is None:
        logits = torch.bmm(around, by_channel)  # (B·K, 9, T)
    else:
        logits = torch.baddbmm(penalty.expand(b, k, 9, 1).flatten(0, 1), around, by_channel)
    association = logits.softmax(1).view(b, k, 9, t)
    if present is not None:
        association = association * present
    return association.mT


def _own_cell(tokens: Tensor, present: Tensor | None) -> Tensor:
    """The association of ``tokens (B, K, T, C)`` with their own cells only: ``(B, K, T, 9)``."""
    centre = F.one_hot(torch.tensor(4, device=tokens.device), 9).to(tokens.dtype)  # of the 3×3 neighbours
    association = centre.expand(*tokens.shape[:3], 9)
    return association if present is None else association * present.mT


def _weighted_means(tokens: Tensor, association: Tensor, cells: Cells, eps: float) -> Tensor:
    """Eq. 2, ``(B, K, C)``."""
    total = add_to_neighbours(association.sum(2).unsqueeze(3), cells.count)  # (B, K, 1)
    return add_to_neighbours(association.mT @ tokens, cells.count) / (total + eps)  # (B, K, C)


def _cell_means(tokens: Tensor, present: Tensor | None) -> Tensor:
    """The initial super tokens, ``(B, K, C)``: means over the tokens that are not padding."""
    if present is None:
        return tokens.mean(2)
    return tokens.sum(2) / present.sum(2)


def _present(cells: Cells, like: Tensor) -> Tensor:
    """``(K, 1, T)``: 1 for tokens of the map, 0 for padding."""
    ones = like.new_ones(1, cells.grid[0] * cells.grid[1], 1)
    return to_cells(ones, cells)[0].mT


def _penalty(cells: Cells, like: Tensor) -> Tensor:
    """``(K, 9, 1)``: 0 for neighbours on the map, -∞ for those outside."""
    inside = neighbours(like.new_ones(1, cells.count[0] * cells.count[1], 1), cells.count)[0]
    return inside.log()
