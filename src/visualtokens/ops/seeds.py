"""Where clustering starts: which tokens, or which mean points, are the first centres."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from visualtokens.ops.checks import own_precision
from visualtokens.ops.groups import take

Init = Tensor | torch.Generator | tuple[int, int] | Literal["distinct"] | None


def seed_indices(init: Init, x: Tensor, k: int, *, weights: Tensor | None) -> Tensor:
    """The tokens that are the first centres, ``(B, K)``.

    | init | first centres |
    |---|---|
    | integer tensor ``(B, K)`` or ``(K,)`` | these tokens, in this order |
    | floating tensor ``(B, N)`` | the K of highest score, the lowest index on ties |
    | ``torch.Generator`` | K different random tokens per image |
    | ``(H, W)`` | the tokens in the middle of K cells of the H×W grid |
    | ``"distinct"`` | those that have no near twin, see :func:`distinct_indices` |
    | None | by ``weights`` as scores; without weights, K tokens at equal steps |

    Except for given indices they come in ascending order, so tokens keep the order of the patches.
    """
    b, n, _ = x.shape
    if init is None and weights is not None:
        return top_k(weights, k)
    if init is None:
        return (torch.arange(k, device=x.device) * n // k).expand(b, k)
    if isinstance(init, Tensor):  # asked first: a compiler cannot ask whether a tensor is a generator
        return _by_score(init, b, n, k) if init.is_floating_point() else _by_index(init, b, n, k)
    if isinstance(init, str):
        if init != "distinct":
            raise ValueError(f"init={init!r} is unknown; the only one that has a name is 'distinct'")
        return distinct_indices(x, k)
    if isinstance(init, torch.Generator):
        return top_k(torch.rand(b, n, generator=init, device=init.device).to(x.device), k)
    return _cell_middles(init, n, k).to(x.device).expand(b, k)


def seed_centres(init: Init, x: Tensor, k: int, *, weights: Tensor | None) -> Tensor:
    """The first centres ``(B, K, C)`` of k-means: as :func:`seed_indices`, and besides

    | init | first centres |
    |---|---|
    | floating tensor ``(B, K, C)`` or ``(K, C)`` | these points |
    | ``(H, W)`` | the means of K cells of the H×W grid |
    """
    b, _, c = x.shape
    if isinstance(init, Tensor) and init.is_floating_point() and init.shape in ((k, c), (b, k, c)):
        return init.to(x.dtype).expand(b, k, c)
    if isinstance(init, tuple):
        return pool_cells(x, init, k)
    return take(x, seed_indices(init, x, k, weights=weights))


def top_k(scores: Tensor, k: int) -> Tensor:
    """Indices of the K highest scores, ascending; on ties the lowest (``torch.topk`` may take any)."""
    order = scores.sort(dim=1, descending=True, stable=True).indices  # (B, N)
    return order[:, :k].sort(dim=1).values


@torch.no_grad()
def distinct_indices(x: Tensor, k: int, *, distance: Tensor | None = None) -> Tensor:
    """K of the N tokens that have no near twin among the others: ``(B, K)``, ascending.

    The tokens are dealt out to two sides in turn, so that of two twins only one can go: those of the
    first side that lie nearest to one of the second are left out. Where fewer than the second side are to
    stay, it is dealt out again. ``distance (B, N, N)``, if known, saves making the N²/4 squared distances.
    """
    n, first, step = x.shape[1], 0, 1
    while k <= n // 2:
        n, first, step = n // 2, first + step, 2 * step
    if k == n:
        return torch.arange(first, x.shape[1], step, device=x.device).expand(len(x), -1)
    ours, theirs = slice(first, None, 2 * step), slice(first + step, None, 2 * step)
    others = torch.arange(first + step, x.shape[1], 2 * step, device=x.device).expand(len(x), -1)
    if distance is None:
        nearest = nearest_distance(x[:, ours], x[:, theirs])  # (B, first side)
    else:
        nearest = distance[:, ours, theirs].amin(2)
    farthest = nearest.sort(dim=1, descending=True, stable=True).indices[:, : k - others.shape[1]]
    return torch.cat((farthest * (2 * step) + first, others), dim=1).sort(dim=1).values


def nearest_distance(x: Tensor, others: Tensor) -> Tensor:
    """min_j ‖x_i − y_j‖² for ``x (B, N, C)`` and ``others (B, M, C)``: ``(B, N)``."""
    if x.dtype != torch.float64:
        x, others = x.float(), others.float()
    with own_precision(x):
        middle = others.mean(1, keepdim=True)  # so that a large common part costs no digits
        x, others = x - middle, others - middle
        square = others.square().sum(2).unsqueeze(1)  # (B, 1, M)
        return torch.baddbmm(square, x, others.mT, alpha=-2).amin(2) + x.square().sum(2)


def cell_grid(k: int, grid: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of exactly K cells, shaped most like the grid: 16 on a square is 4×4, 8 is 2×4."""
    height, width = grid

    def mismatch(rows: int) -> float:
        """The ratio of the two aspect ratios, whichever way it is above one."""
        down, across = rows * width, k // rows * height
        return max(down, across) / min(down, across)

    if k < 1:
        raise ValueError(f"k={k} cells cannot be laid out; give at least 1")
    rows = 1
    for candidate in range(2, k + 1):
        if k % candidate == 0 and mismatch(candidate) < mismatch(rows):  # on ties the fewer rows
            rows = candidate
    return rows, k // rows


def pool_cells(x: Tensor, grid: tuple[int, int], k: int) -> Tensor:
    """Average ``x (B, N, C)`` over K cells of its grid: ``(B, K, C)``. More cells than patches overlap."""
    _check_grid(grid, x.shape[1])
    cells = F.adaptive_avg_pool2d(x.mT.unflatten(2, grid), cell_grid(k, grid))  # (B, C, rows, columns)
    return cells.flatten(2).mT


def _by_score(scores: Tensor, b: int, n: int, k: int) -> Tensor:
    if scores.shape != (b, n):
        raise ValueError(f"init has scores of shape {tuple(scores.shape)}; expected (B, N) = {(b, n)}")
    return top_k(scores, k)


def _by_index(index: Tensor, b: int, n: int, k: int) -> Tensor:
    if index.shape not in ((k,), (b, k)):
        expected = f"(K,) = {(k,)} or (B, K) = {(b, k)}"
        raise ValueError(f"init has indices of shape {tuple(index.shape)}; expected {expected}")
    if not torch.compiler.is_compiling() and ((index < 0) | (index >= n)).any():
        raise ValueError(f"init has indices from {index.min()} to {index.max()}; expected 0 to {n - 1}")
    return index.long().expand(b, k)


def _cell_middles(grid: tuple[int, int], n: int, k: int) -> Tensor:
    _check_grid(grid, n)
    rows, columns = cell_grid(k, grid)
    if rows > grid[0] or columns > grid[1]:
        raise ValueError(f"k={k} makes {rows}×{columns} cells, too many for {grid[0]}×{grid[1]} patches")
    y = (2 * torch.arange(rows) + 1) * grid[0] // (2 * rows)  # (rows,)
    x = (2 * torch.arange(columns) + 1) * grid[1] // (2 * columns)  # (columns,)
    return (y.unsqueeze(1) * grid[1] + x).flatten()  # (K,)


def _check_grid(grid: tuple[int, int], n: int) -> None:
    if grid[0] * grid[1] != n:
        raise ValueError(f"init={grid} is a grid of {grid[0] * grid[1]} patches, but x has {n}")
