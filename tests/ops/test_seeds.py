"""Initial centres: each kind of ``init``, the cells of a grid, and tokens without near-duplicates."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visualtokens.ops import cell_grid, pool_cells
from visualtokens.ops.seeds import distinct_indices, seed_centres, seed_indices, top_k

from .helpers import EXAMPLES, assert_close, assert_same_leaves, compiled, layouts, rand, randint, randn


def reference_top_k(scores: list[float], k: int) -> list[int]:
    """K times the first of the highest remaining scores."""
    left = list(range(len(scores)))
    taken = []
    for _ in range(min(k, len(scores))):
        best = max(left, key=lambda i: (scores[i], -i))
        left.remove(best)
        taken.append(best)
    return sorted(taken)


def reference_cell_grid(k: int, grid: tuple[int, int]) -> tuple[int, int]:
    """The factorisation with the aspect ratio nearest to that of the grid, in exact arithmetic."""
    best: tuple[Fraction, int, int] | None = None
    for rows in range(1, k + 1):
        if k % rows == 0:
            ratio = Fraction(rows, k // rows) / Fraction(grid[0], grid[1])
            candidate = (max(ratio, 1 / ratio), rows, k // rows)
            best = candidate if best is None else min(best, candidate)
    assert best is not None
    return best[1], best[2]


def reference_pool(x: Tensor, grid: tuple[int, int], k: int) -> Tensor:
    """Cell r of R covers the rows from ⌊r·H/R⌋ to ⌈(r + 1)·H/R⌉, as adaptive pooling does."""
    (height, width), (rows, columns) = grid, reference_cell_grid(k, grid)
    out = torch.zeros(x.shape[0], k, x.shape[2], dtype=torch.float64)
    for r in range(rows):
        for c in range(columns):
            ys = range(r * height // rows, math.ceil(Fraction((r + 1) * height, rows)))
            xs = range(c * width // columns, math.ceil(Fraction((c + 1) * width, columns)))
            inside = [x[:, y * width + z].double() for y in ys for z in xs]
            out[:, r * columns + c] = torch.stack(inside).mean(0)
    return out


@EXAMPLES
@given(n=st.integers(1, 30), levels=st.integers(1, 5), seed=st.integers(0, 10_000), data=st.data())
def test_top_k_prefers_the_lowest_index_on_ties(n: int, levels: int, seed: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n + 2))
    scores = randint(levels, 3, n, seed=seed).double()
    assert top_k(scores, k).tolist() == [reference_top_k(row, k) for row in scores.tolist()]


def test_given_indices_keep_their_order() -> None:
    x = randn(2, 6, 3)
    assert seed_indices(torch.tensor([4, 0, 2]), x, 3, weights=None).tolist() == [[4, 0, 2]] * 2
    each = torch.tensor([[5, 1], [0, 3]])
    assert torch.equal(seed_indices(each, x, 2, weights=None), each)
    expected = torch.stack([x[0, [5, 1]], x[1, [0, 3]]])
    assert torch.equal(seed_centres(each, x, 2, weights=None), expected)


def test_indices_of_another_integer_type() -> None:
    index = torch.tensor([6, 1, 3], dtype=torch.int32)
    assert seed_indices(index, randn(2, 8, 3), 3, weights=None).dtype == torch.int64


@pytest.mark.parametrize("wrong", [-1, 8])
def test_indices_outside_the_image_are_an_error(wrong: int) -> None:
    """They would read from another image of the batch."""
    with pytest.raises(ValueError, match="expected 0 to 7"):
        seed_indices(torch.tensor([[0, wrong], [0, 1]]), randn(2, 8, 3), 2, weights=None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_highest_scores(dtype: torch.dtype) -> None:
    x, scores = randn(3, 20, 4, seed=1), rand(3, 20, seed=2, dtype=dtype)
    expected = [reference_top_k(row, 5) for row in scores.double().tolist()]
    assert seed_indices(scores, x, 5, weights=None).tolist() == expected
    assert seed_indices(None, x, 5, weights=scores).tolist() == expected  # weights are scores
    assert seed_indices(scores, x, 5, weights=1 - scores).tolist() == expected  # unless an init is given
    centres = seed_centres(scores, x, 5, weights=None)
    assert torch.equal(centres, torch.stack([x[b, expected[b]] for b in range(3)]))


def test_evenly_spaced_without_weights() -> None:
    x = randn(2, 10, 3)
    assert seed_indices(None, x, 4, weights=None).tolist() == [[0, 2, 5, 7]] * 2
    assert seed_indices(None, x, 9, weights=None).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8]] * 2


def test_a_generator_draws_different_tokens_uniformly() -> None:
    x = torch.zeros(4000, 5, 1)
    index = seed_indices(torch.Generator().manual_seed(0), x, 2, weights=None)
    assert (index[:, 0] < index[:, 1]).all()
    assert ((index >= 0) & (index < 5)).all()
    # Each of the 10 pairs is drawn 400 times, with a standard deviation of 19.
    pairs = torch.bincount(5 * index[:, 0] + index[:, 1])
    pairs = pairs[pairs > 0]
    assert len(pairs) == 10
    assert (pairs - 400).abs().max() < 5 * 19


def test_a_generator_is_repeatable_and_advances() -> None:
    x, generator = randn(2, 40, 3), torch.Generator().manual_seed(7)
    first, second = (seed_indices(generator, x, 5, weights=None) for _ in range(2))
    again = seed_indices(torch.Generator().manual_seed(7), x, 5, weights=None)
    assert torch.equal(again, first)
    assert not torch.equal(first, second)


def test_given_centres() -> None:
    x = randn(2, 6, 3)
    shared, each = randn(4, 3, seed=1), randn(2, 4, 3, seed=2)
    assert torch.equal(seed_centres(shared, x, 4, weights=None), shared.expand(2, 4, 3))
    assert torch.equal(seed_centres(each, x, 4, weights=None), each)
    assert seed_centres(shared.float(), x, 4, weights=None).dtype == torch.float64


@pytest.mark.parametrize(
    ("k", "grid", "expected"),
    [
        (16, (14, 14), (4, 4)),
        (8, (14, 14), (2, 4)),
        (32, (14, 14), (4, 8)),
        (16, (3, 3), (4, 4)),  # more cells than patches: a 33×33 image at stride 16
        (8, (28, 14), (4, 2)),
        (16, (50, 76), (4, 4)),
        (16, (1, 40), (1, 16)),
        (7, (14, 14), (1, 7)),
        (1, (5, 9), (1, 1)),
    ],
)
def test_cells_are_shaped_like_the_grid(k: int, grid: tuple[int, int], expected: tuple[int, int]) -> None:
    assert cell_grid(k, grid) == expected


@EXAMPLES
@given(k=st.integers(1, 64), height=st.integers(1, 40), width=st.integers(1, 40))
def test_cell_grid_equals_the_reference(k: int, height: int, width: int) -> None:
    rows, columns = cell_grid(k, (height, width))
    assert rows * columns == k
    assert (rows, columns) == reference_cell_grid(k, (height, width))


@EXAMPLES
@given(
    k=st.integers(1, 16),
    height=st.integers(1, 12),
    width=st.integers(1, 12),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_pool_equals_the_reference(k: int, height: int, width: int, dtype: torch.dtype) -> None:
    x = randn(2, height * width, 3, dtype=dtype)
    result = pool_cells(x, (height, width), k)
    assert result.dtype == dtype
    assert_close(result, reference_pool(x, (height, width), k))
    assert torch.equal(seed_centres((height, width), x, k, weights=None), result)


@EXAMPLES
@given(rows=st.integers(1, 4), columns=st.integers(1, 4), high=st.integers(1, 5))
def test_centres_of_cells(rows: int, columns: int, high: int) -> None:
    """The centre of a cell of h×h patches is its patch (⌊h/2⌋, ⌊h/2⌋)."""
    height, width, k = rows * high, columns * high, rows * columns
    index = seed_indices((height, width), randn(2, height * width, 1), k, weights=None)
    assert cell_grid(k, (height, width)) == (rows, columns)
    expected = [
        (r * high + high // 2) * width + c * high + high // 2 for r in range(rows) for c in range(columns)
    ]
    assert index.tolist() == [expected] * 2


@EXAMPLES
@given(k=st.integers(1, 20), height=st.integers(1, 12), width=st.integers(1, 12))
def test_centres_of_cells_are_different_tokens(k: int, height: int, width: int) -> None:
    x = randn(1, height * width, 1)
    rows, columns = cell_grid(k, (height, width))
    if rows > height or columns > width:
        with pytest.raises(ValueError, match=f"k={k} makes {rows}×{columns} cells"):
            seed_indices((height, width), x, k, weights=None)
        return
    index = seed_indices((height, width), x, k, weights=None)[0].tolist()
    assert len(set(index)) == k
    assert index == sorted(index)
    assert index[0] >= 0
    assert index[-1] < height * width


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pooling_many_patches_in_low_precision(dtype: torch.dtype) -> None:
    """10,000 patches per cell: a running half-precision sum would stop growing."""
    x = (1 + 0.1 * rand(1, 200 * 200, 2)).to(dtype)
    result = pool_cells(x, (200, 200), 4)
    assert result.dtype == dtype
    cells = x.double().view(2, 100, 2, 100, 2).mean((1, 3)).view(1, 4, 2)
    assert_close(result, cells)


def test_pooling_layout_and_gradient_and_autocast() -> None:
    x = randn(3, 12, 4)
    expected = pool_cells(x, (3, 4), 4)
    for other in layouts(x):
        assert_close(pool_cells(other, (3, 4), 4), expected)
    assert torch.autograd.gradcheck(lambda x: pool_cells(x, (3, 4), 4), x.requires_grad_(), fast_mode=True)
    single = x.detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(pool_cells(single, (3, 4), 4), expected.detach(), torch.float32)


def test_every_init_compiles_to_one_graph() -> None:
    def seeds(
        x: Tensor, index: Tensor, scores: Tensor, centres: Tensor, grid: tuple[int, int]
    ) -> list[Tensor]:
        inits = (index, scores, grid, "distinct", None)
        found = [seed_indices(init, x, 4, weights=None) for init in inits]
        return found + [seed_centres(init, x, 4, weights=None) for init in (*inits, centres)]

    one_graph = compiled(seeds)
    for grid in ((3, 4), (6, 5)):  # the second size makes the graph symbolic
        n = grid[0] * grid[1]
        inputs = randn(2, n, 3, seed=5), torch.tensor([3, 0, 7, 9]), rand(2, n, seed=4), randn(4, 3, seed=6)
        assert_same_leaves(one_graph(*inputs, grid), seeds(*inputs, grid))


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (torch.zeros(2, 5), r"scores of shape \(2, 5\); expected \(B, N\) = \(2, 12\)"),
        (torch.zeros(5, dtype=torch.long), r"indices of shape \(5,\); expected \(K,\) = \(4,\)"),
        ((5, 5), r"\(5, 5\) is a grid of 25 patches, but x has 12"),
        ("distant", "'distinct'"),
    ],
)
def test_invalid_inits(init: Any, message: str) -> None:
    for seed in (seed_indices, seed_centres):
        with pytest.raises(ValueError, match=message):
            seed(init, torch.zeros(2, 12, 3), 4, weights=None)


def test_pooling_to_no_cell_is_an_error() -> None:
    with pytest.raises(ValueError, match="k=0"):
        pool_cells(torch.zeros(2, 12, 3), (3, 4), 0)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("n", "k"), [(9, 8), (9, 5), (10, 5), (10, 3), (7, 1), (2, 1)])
def test_distinct_tokens_equal_the_reference(n: int, k: int, known: bool) -> None:
    x = randn(3, n, 4)
    distance = (x.unsqueeze(1) - x.unsqueeze(2)).square().sum(3)
    found = distinct_indices(x, k, distance=distance if known else None)
    for b in range(3):
        left = list(range(n))
        while k <= len(left) // 2:
            left = left[1::2]
        nearest = {i: distance[b, i, left[1::2]].min() for i in left[::2] if k < len(left)}
        dropped = sorted(nearest, key=nearest.__getitem__)[: len(left) - k]
        assert found[b].tolist() == [i for i in left if i not in dropped]


def test_one_of_two_equal_tokens_is_dropped() -> None:
    x = randn(1, 8, 5)
    x[0, 3] = x[0, 6]
    assert distinct_indices(x, 7).tolist() == [[0, 1, 2, 3, 4, 5, 7]]
