"""Initial centres of a clustering: which tokens, or which mean points."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from visualtokens.ops.distances import nearest_distance, origin
from visualtokens.ops.groups import take
from visualtokens.ops.numerics import upcast

Init = Tensor | torch.Generator | tuple[int, int] | Literal["distinct"] | None


def seed_indices(
    init: Init, x: Tensor, k: int, *, weights: Tensor | None, distance: Tensor | None = None
) -> Tensor:
    """Tokens of ``x (B, N, C)`` that are the initial centres, ``(B, K)``.

    | init | initial centres |
    |---|---|
    | integer tensor ``(B, K)`` or ``(K,)`` | these tokens, in this order |
    | floating tensor ``(B, N)`` | the K highest scores, the lowest index on ties |
    | ``torch.Generator`` | K different random tokens per image |
    | ``(H, W)`` | the tokens at the centres of K cells of the H×W grid |
    | ``"distinct"`` | tokens without a near-duplicate, see :func:`distinct_indices` |
    | None | ``weights (B, N)`` as scores; without weights, K evenly spaced tokens |

    Except for given indices the order is ascending, so tokens keep the order of their patches.
    ``distance (B, N, N)``, if available, is used by "distinct".
    """
    b, n, _ = x.shape
    if init is None and weights is not None:
        return top_k(weights, k)
    if init is None:
        return (torch.arange(k, device=x.device) * n // k).expand(b, k)
    if isinstance(init, Tensor):  # first: torch.compile cannot test a tensor for being a generator
        return _by_score(init, b, n, k) if init.is_floating_point() else _by_index(init, b, n, k)
    if isinstance(init, str):
        if init != "distinct":
            raise ValueError(f"init={init!r} is unknown; the only named one is 'distinct'")
        return distinct_indices(x, k, distance=distance)
    if isinstance(init, torch.Generator):
        return top_k(torch.rand(b, n, generator=init, device=init.device).to(x.device), k)
    return _cell_centres(init, n, k).to(x.device).expand(b, k)


def seed_centres(init: Init, x: Tensor, k: int, *, weights: Tensor | None) -> Tensor:
    """Initial centres of k-means, ``(B, K, C)``: those of :func:`seed_indices`, and in addition

    | init | initial centres |
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
    """Indices of the K highest of ``scores (B, N)``, ascending: ``(B, K)``.

    On ties the lowest index wins; ``torch.topk`` may return any.
    """
    return highest(scores, k).sort(dim=1).values


def highest(scores: Tensor, k: int) -> Tensor:
    """Indices of the K highest of ``scores (B, N)``, the highest first, the lowest index on ties: ``(B, K)``.

    ``torch.onnx.export`` knows no stable sort; there ``topk`` becomes ONNX's ``TopK``, which breaks ties this
    way. ``visualtokens.export`` converts the sort itself.
    """
    if torch.onnx.is_in_onnx_export():
        return scores.topk(min(k, scores.shape[1]), dim=1).indices
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :k]


@torch.no_grad()
def distinct_indices(x: Tensor, k: int, *, distance: Tensor | None = None) -> Tensor:
    """K tokens of ``x (B, N, C)`` that have no near-duplicate among the others: ``(B, K)``, ascending.

    The tokens are split alternately into two sets, so that of two near-duplicates at most one is dropped:
    the tokens of the first set that lie nearest to any of the second are dropped. If K is at most the
    size of the second set, the second set is split again. ``distance (B, N, N)``, if available, saves
    computing the N²/4 squared distances.
    """
    # The tokens that are split lie at first, first + step, first + 2·step, …
    n, first, step = x.shape[1], 0, 1
    while k <= n // 2:
        n, first, step = n // 2, first + step, 2 * step
    if k == n:
        return torch.arange(first, x.shape[1], step, device=x.device).expand(x.shape[0], -1)
    one, other = slice(first, None, 2 * step), slice(first + step, None, 2 * step)
    if distance is None:
        x = upcast(x)
        x = x - origin(x)
        isolation = nearest_distance(x[:, one], x[:, other])  # (B, first set)
    else:
        isolation = distance[:, one, other].amin(2)
    kept = torch.arange(first + step, x.shape[1], 2 * step, device=x.device).expand(x.shape[0], -1)
    isolated = highest(isolation, k - kept.shape[1])
    return torch.cat((isolated * (2 * step) + first, kept), dim=1).sort(dim=1).values


def cell_grid(k: int, grid: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of exactly K cells with the aspect ratio nearest to that of the grid (H, W).

    16 cells on a square grid are 4×4, 8 are 2×4.
    """
    height, width = grid

    def mismatch(rows: int) -> float:
        """Quotient of the two aspect ratios, at least 1."""
        down, across = rows * width, k // rows * height
        return max(down, across) / min(down, across)

    if k < 1:
        raise ValueError(f"k={k} cells cannot be laid out; give at least 1")
    rows = 1
    for candidate in range(2, k + 1):
        if k % candidate == 0 and mismatch(candidate) < mismatch(rows):  # on ties fewer rows
            rows = candidate
    return rows, k // rows


def pool_cells(x: Tensor, grid: tuple[int, int], k: int) -> Tensor:
    """Means of ``x (B, N, C)`` over K cells of its grid (H, W): ``(B, K, C)``.

    If there are more cells than patches, cells overlap.
    """
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
    readable = not torch.compiler.is_compiling() and not index.is_meta
    if readable and ((index < 0) | (index >= n)).any():
        raise ValueError(f"init has indices from {index.min()} to {index.max()}; expected 0 to {n - 1}")
    return index.long().expand(b, k)


def _cell_centres(grid: tuple[int, int], n: int, k: int) -> Tensor:
    """Indices of the patches at the centres of K cells, ``(K,)``."""
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
