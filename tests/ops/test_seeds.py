from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visualtokens.ops import cell_grid, kmeans, kmedoids, pool_cells
from visualtokens.ops.seeds import distinct_indices, seed_centres, seed_indices, top_k

from .helpers import EXAMPLES, assert_close, assert_same_leaves, compiled, layouts, rand, randint, randn


def reference_top_k(scores: list[float], k: int) -> list[int]:
    """Take the first of the highest that are left, K times."""
    left = list(range(len(scores)))
    taken = []
    for _ in range(min(k, len(scores))):
        best = max(left, key=lambda i: (scores[i], -i))
        left.remove(best)
        taken.append(best)
    return sorted(taken)


def reference_cell_grid(k: int, grid: tuple[int, int]) -> tuple[int, int]:
    """The factorisation whose aspect ratio is nearest to that of the grid as a ratio, in exact arithmetic."""
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
def test_top_k_takes_the_lowest_index_on_ties(n: int, levels: int, seed: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n + 2))
    scores = randint(levels, 3, n, seed=seed).double()
    assert top_k(scores, k).tolist() == [reference_top_k(row, k) for row in scores.tolist()]


def test_given_indices_stay_in_their_order() -> None:
    x = randn(2, 6, 3)
    assert seed_indices(torch.tensor([4, 0, 2]), x, 3, weights=None).tolist() == [[4, 0, 2]] * 2
    each = torch.tensor([[5, 1], [0, 3]])
    assert torch.equal(seed_indices(each, x, 2, weights=None), each)
    expected = torch.stack([x[0, [5, 1]], x[1, [0, 3]]])
    assert torch.equal(seed_centres(each, x, 2, weights=None), expected)


@pytest.mark.parametrize("cluster", [kmeans, kmedoids])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_of_any_integer_type(cluster: Any, dtype: torch.dtype) -> None:
    x, index = randn(2, 8, 3, seed=1), torch.tensor([6, 1, 3])
    assert_same_leaves(cluster(x, 3, init=index.to(dtype)), cluster(x, 3, init=index))


@pytest.mark.parametrize("cluster", [kmeans, kmedoids])
@pytest.mark.parametrize("wrong", [-1, 8, 9])
def test_indices_outside_the_image_are_an_error(cluster: Any, wrong: int) -> None:
    """They must never reach into the next image of the batch."""
    init = torch.tensor([[0, wrong], [0, 1]])
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        cluster(randn(2, 8, 3), 2, init=init, iterations=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_choose_the_highest(dtype: torch.dtype) -> None:
    x, scores = randn(3, 20, 4, seed=1), rand(3, 20, seed=2, dtype=dtype)
    expected = [reference_top_k(row, 5) for row in scores.double().tolist()]
    assert seed_indices(scores, x, 5, weights=None).tolist() == expected
    assert seed_indices(None, x, 5, weights=scores).tolist() == expected  # significance is both
    assert seed_indices(scores, x, 5, weights=1 - scores).tolist() == expected  # a given init comes first
    centres = seed_centres(scores, x, 5, weights=None)
    assert torch.equal(centres, torch.stack([x[b, expected[b]] for b in range(3)]))


def test_equal_steps_without_weights() -> None:
    x = randn(2, 10, 3)
    assert seed_indices(None, x, 4, weights=None).tolist() == [[0, 2, 5, 7]] * 2
    for k in range(1, 10):
        index = seed_indices(None, x, k, weights=None)[0].tolist()
        assert index == [j * 10 // k for j in range(k)]


def test_generator_draws_different_tokens_evenly() -> None:
    x = torch.zeros(4000, 5, 1)
    index = seed_indices(torch.Generator().manual_seed(0), x, 2, weights=None)
    assert (index[:, 0] < index[:, 1]).all()
    assert ((index >= 0) & (index < 5)).all()
    # each of the 10 pairs is drawn 400 times, give or take 19 (binomial)
    pairs = torch.bincount(5 * index[:, 0] + index[:, 1])
    pairs = pairs[pairs > 0]
    assert len(pairs) == 10
    assert (pairs - 400).abs().max() < 5 * 19


@pytest.mark.parametrize("cluster", [kmeans, kmedoids])
def test_generator_is_repeatable_and_moves_on(cluster: Any) -> None:
    x = randn(2, 40, 3, seed=3)
    generator = torch.Generator().manual_seed(7)
    first, second = cluster(x, 5, init=generator), cluster(x, 5, init=generator)
    again = cluster(x, 5, init=torch.Generator().manual_seed(7))
    assert_same_leaves(again, first)
    assert not torch.equal(first.assignment, second.assignment)


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


@pytest.mark.parametrize("grid", [(9, 9), (97, 13), (10, 14), (14, 20), (200, 304), (1, 50)])
def test_pooling_gives_exactly_k_tokens_at_every_size(grid: tuple[int, int]) -> None:
    x = torch.ones(1, grid[0] * grid[1], 2)
    for k in (8, 16, 32):
        assert_close(pool_cells(x, grid, k), torch.ones(1, k, 2))


@EXAMPLES
@given(rows=st.integers(1, 4), columns=st.integers(1, 4), high=st.integers(1, 5))
def test_middles_of_the_cells(rows: int, columns: int, high: int) -> None:
    """On square-ish cells of h×h patches the middle is patch (⌊h/2⌋, ⌊h/2⌋) of each cell."""
    height, width, k = rows * high, columns * high, rows * columns
    index = seed_indices((height, width), randn(2, height * width, 1), k, weights=None)
    assert cell_grid(k, (height, width)) == (rows, columns)
    expected = [
        (r * high + high // 2) * width + c * high + high // 2 for r in range(rows) for c in range(columns)
    ]
    assert index.tolist() == [expected] * 2


@EXAMPLES
@given(k=st.integers(1, 20), height=st.integers(1, 12), width=st.integers(1, 12))
def test_middles_are_different_tokens_of_the_image(k: int, height: int, width: int) -> None:
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
    """40,000 patches per cell: a running half-precision sum would stop growing."""
    x = (1 + 0.1 * rand(1, 400 * 400, 2)).to(dtype)
    result = pool_cells(x, (400, 400), 4)
    assert result.dtype == dtype
    cells = x.double().view(2, 200, 2, 200, 2).mean((1, 3)).view(1, 4, 2)
    assert_close(result, cells)


def test_pooling_layout_and_gradient_and_autocast() -> None:
    x = randn(3, 12, 4)
    expected = pool_cells(x, (3, 4), 4)
    for _, other in layouts(x):
        assert_close(pool_cells(other, (3, 4), 4), expected)
    assert torch.autograd.gradcheck(lambda x: pool_cells(x, (3, 4), 4), x.requires_grad_())
    single = x.detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(pool_cells(single, (3, 4), 4), expected.detach(), torch.float32)


@pytest.mark.parametrize("cluster", [kmeans, kmedoids])
@pytest.mark.parametrize("init", [torch.tensor([3, 0, 7, 9]), rand(2, 12, seed=4)], ids=["indices", "scores"])
def test_given_inits_compile_to_one_graph(init: Tensor, cluster: Any) -> None:
    x = randn(2, 12, 3, seed=5)
    result = compiled(cluster)(x, 4, init=init, iterations=1)
    assert_same_leaves(result, cluster(x, 4, init=init, iterations=1))


def test_given_centres_compile_to_one_graph() -> None:
    x, centres = randn(2, 12, 3, seed=5), randn(4, 3, seed=6)
    result = compiled(kmeans)(x, 4, init=centres, iterations=1)
    assert_same_leaves(result, kmeans(x, 4, init=centres, iterations=1))


@pytest.mark.parametrize("cluster", [kmeans, kmedoids])
def test_grids_compile_to_one_graph(cluster: Any) -> None:
    one_graph = compiled(cluster)
    for grid in ((3, 4), (6, 5)):  # the second size makes the graph symbolic
        x = randn(2, grid[0] * grid[1], 3, seed=5)
        result = one_graph(x, 4, init=grid, iterations=1)
        assert_same_leaves(result, cluster(x, 4, init=grid, iterations=1))


def test_pooling_compiles_to_one_graph() -> None:
    one_graph = compiled(pool_cells)
    for grid in ((3, 4), (6, 5)):
        x = randn(2, grid[0] * grid[1], 3, seed=5)
        assert_same_leaves(one_graph(x, grid, 4), pool_cells(x, grid, 4))


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (torch.zeros(2, 5), r"scores of shape \(2, 5\); expected \(B, N\) = \(2, 12\)"),
        (torch.zeros(5, dtype=torch.long), r"indices of shape \(5,\); expected \(K,\) = \(4,\)"),
        ((5, 5), r"\(5, 5\) is a grid of 25 patches, but x has 12"),
    ],
)
@pytest.mark.parametrize("cluster", [kmeans, kmedoids])
def test_wrong_inits_are_named(cluster: Any, init: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cluster(torch.zeros(2, 12, 3), 4, init=init)


@pytest.mark.parametrize("k", [0, -1])
def test_pooling_to_no_cell_is_an_error_that_names_k(k: int) -> None:
    with pytest.raises(ValueError, match=f"k={k}"):
        pool_cells(torch.zeros(2, 12, 3), (3, 4), k)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("n", "k"), [(9, 8), (9, 5), (10, 6), (10, 5), (10, 3), (11, 2), (7, 1), (2, 1)])
def test_distinct_tokens_are_those_without_a_near_twin(n: int, k: int, known: bool) -> None:
    x = randn(3, n, 4)
    distance = (x.unsqueeze(1) - x.unsqueeze(2)).square().sum(3) if known else None
    found = distinct_indices(x, k, distance=distance)
    for b in range(3):
        left = list(range(n))
        while k <= len(left) // 2:
            left = left[1::2]

        def nearest(i: int, b: int = b, others: tuple[int, ...] = tuple(left[1::2])) -> float:
            return min((x[b, i] - x[b, j]).square().sum().item() for j in others)

        gone = sorted(left[::2], key=nearest)[: len(left) - k] if k < len(left) else []
        assert found[b].tolist() == [i for i in left if i not in gone]


def test_of_two_twins_one_stays() -> None:
    x = randn(1, 8, 5)
    x[0, 3] = x[0, 6]
    assert distinct_indices(x, 7).tolist() == [[0, 1, 2, 3, 4, 5, 7]]


def test_an_unknown_named_start_is_refused() -> None:
    with pytest.raises(ValueError, match="'distinct'"):
        kmeans(randn(1, 8, 5), 3, init="distant")
