"""Super tokens against loops over tokens, and against the listing of the supplement."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visualtokens.ops import (
    Cells,
    super_token_association,
    super_token_gather,
    super_token_scatter,
)
from visualtokens.ops.super_tokens import add_to_neighbours, from_cells, neighbours, to_cells

from .helpers import (
    EXAMPLES,
    LargestTensor,
    assert_close,
    assert_same_leaves,
    compiled,
    layouts,
    rand,
    randn,
)

Border = Literal["released", "exact"]
BORDERS: list[Any] = ["released", "exact"]
STEPS = [(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
EPS = 1e-12
SHAPES = [
    Cells((24, 24), (8, 8)),
    Cells((25, 17), (8, 8)),
    Cells((17, 33), (4, 8)),
    Cells((1, 7), (2, 2)),
    Cells((1, 7), (1, 1)),
    Cells((5, 6), (8, 9)),  # the cell is larger than the grid: one super token
]


class Reference:
    """One image and one token at a time, over the super tokens of the nine cells around it."""

    def __init__(self, cells: Cells, border: Border) -> None:
        self.cells, self.border = cells, border
        (height, width), (h, w) = cells.grid, cells.cell
        self.count = (height + h - 1) // h, (width + w - 1) // w
        # Padding takes part in "released" and does not exist in "exact".
        released = border == "released"
        self.rows = range(self.count[0] * h if released else height)
        self.columns = range(self.count[1] * w if released else width)

    def token(self, x: np.ndarray, y: int, z: int) -> np.ndarray:
        height, width = self.cells.grid
        return x[y * width + z] if y < height and z < width else np.zeros(x.shape[1])

    def around(self, y: int, z: int) -> list[tuple[int, tuple[int, int], bool]]:
        """The nine cells around token (y, z): number, position, and whether it lies on the map."""
        cy, cz = y // self.cells.cell[0], z // self.cells.cell[1]
        cells = [(cy + dy, cz + dz) for dy, dz in STEPS]
        inside = [0 <= a < self.count[0] and 0 <= b < self.count[1] for a, b in cells]
        return list(zip(range(9), cells, inside, strict=True))

    def place(self, y: int, z: int) -> tuple[int, int]:
        """The index of the token's cell, and of the token within the cell."""
        h, w = self.cells.cell
        return y // h * self.count[1] + z // w, y % h * w + z % w

    def first(self, x: np.ndarray) -> np.ndarray:
        """The mean of each cell, ``(p, q, C)``."""
        total, number = np.zeros((*self.count, x.shape[1])), np.zeros((*self.count, 1))
        for y in self.rows:
            for z in self.columns:
                cell = y // self.cells.cell[0], z // self.cells.cell[1]
                total[cell] += self.token(x, y, z)
                number[cell] += 1
        return total / number

    def own_cell(self) -> np.ndarray:
        """Each token with the super token of its cell only, ``(K, T, 9)``."""
        h, w = self.cells.cell
        out = np.zeros((self.count[0] * self.count[1], h * w, 9))
        for y in self.rows:
            for z in self.columns:
                out[self.place(y, z)][STEPS.index((0, 0))] = 1
        return out

    def associate(self, x: np.ndarray, supers: np.ndarray) -> np.ndarray:
        """Eq. 1, ``(K, T, 9)``."""
        h, w = self.cells.cell
        out = np.zeros((self.count[0] * self.count[1], h * w, 9))
        for y in self.rows:
            for z in self.columns:
                logits = np.full(9, -np.inf if self.border == "exact" else 0.0)
                for i, cell, inside in self.around(y, z):
                    if inside:
                        logits[i] = self.token(x, y, z) @ supers[cell] / np.sqrt(x.shape[1])
                e = np.exp(logits - logits.max())
                out[self.place(y, z)] = e / e.sum()
        return out

    def gather(self, x: np.ndarray, association: np.ndarray) -> np.ndarray:
        """Eq. 2, ``(p, q, C)``."""
        total, weight = np.zeros((*self.count, x.shape[1])), np.zeros((*self.count, 1))
        for y in self.rows:
            for z in self.columns:
                for i, cell, inside in self.around(y, z):
                    if inside:
                        total[cell] += association[self.place(y, z)][i] * self.token(x, y, z)
                        weight[cell] += association[self.place(y, z)][i]
        return total / (weight + EPS)

    def scatter(self, supers: np.ndarray, association: np.ndarray) -> np.ndarray:
        """``(N, C)``; super tokens outside the map are zero."""
        height, width = self.cells.grid
        out = np.zeros((height * width, supers.shape[2]))
        for y in range(height):
            for z in range(width):
                for i, cell, inside in self.around(y, z):
                    if inside:
                        out[y * width + z] += association[self.place(y, z)][i] * supers[cell]
        return out

    def run(self, x: np.ndarray, n_iter: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        supers = self.first(x)
        association = self.own_cell()
        for _ in range(n_iter):
            association = self.associate(x, supers)
            supers = self.gather(x, association)
        return association, supers.reshape(-1, x.shape[1]), self.scatter(supers, association)


def algorithm_1(x: Tensor, cells: Cells, n_iter: int) -> tuple[Tensor, Tensor, Tensor]:
    """The listing of the supplement, by F.unfold and F.fold; padded at the bottom and right, then cropped."""
    b, c = x.shape[0], x.shape[2]
    (height, width), (h, w) = cells.grid, cells.cell
    p, q = -(-height // h), -(-width // w)
    image = F.pad(x.mT.reshape(b, c, height, width), (0, q * w - width, 0, p * h - height))
    tokens = image.view(b, c, p, h, q, w).permute(0, 2, 4, 3, 5, 1).reshape(b, p * q, h * w, c)
    supers = F.adaptive_avg_pool2d(image, (p, q))
    for _ in range(n_iter):
        unfolded = F.unfold(supers, 3, padding=1).transpose(1, 2).reshape(b, p * q, c, 9)
        association = (tokens @ unfolded * c**-0.5).softmax(-1)
        total = F.fold(association.sum(2).transpose(1, 2).reshape(b, 9, p * q), (p, q), 3, padding=1)
        summed = (tokens.transpose(-1, -2) @ association).permute(0, 2, 3, 1).reshape(b, c * 9, p * q)
        supers = F.fold(summed, (p, q), 3, padding=1) / (total + EPS)
    unfolded = F.unfold(supers, 3, padding=1).transpose(1, 2).reshape(b, p * q, c, 9)
    out = unfolded @ association.transpose(-1, -2)  # (B, K, C, T)
    out = out.reshape(b, p, q, c, h, w).permute(0, 3, 1, 4, 2, 5).reshape(b, c, p * h, q * w)
    return association, supers.flatten(2).mT, out[:, :, :height, :width].flatten(2).mT


def run(x: Tensor, cells: Cells, border: Border, n_iter: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    association = super_token_association(x, cells, n_iter=n_iter, border=border)
    supers = super_token_gather(x, association, cells)
    return association, supers, super_token_scatter(supers, association, cells)


@pytest.mark.parametrize("border", BORDERS)
@EXAMPLES
@given(
    grid=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    cell=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    c=st.integers(1, 6),
    n_iter=st.integers(0, 3),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 10_000),
)
def test_equals_the_reference(
    border: Border,
    grid: tuple[int, int],
    cell: tuple[int, int],
    c: int,
    n_iter: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    x, cells = randn(2, grid[0] * grid[1], c, seed=seed, dtype=dtype), Cells(grid, cell)
    result = run(x, cells, border, n_iter)
    for b in range(2):
        expected = Reference(cells, border).run(x[b].double().numpy(), n_iter)
        for actual, wanted in zip(result, expected, strict=True):
            assert_close(actual[b], wanted)


@pytest.mark.parametrize("n_iter", [1, 3])
@pytest.mark.parametrize("cells", SHAPES)
def test_released_equals_the_listing(cells: Cells, n_iter: int) -> None:
    x = randn(2, cells.grid[0] * cells.grid[1], 5, seed=2)
    result, expected = run(x, cells, "released", n_iter), algorithm_1(x, cells, n_iter)
    for actual, wanted in zip(result, expected, strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize("n_iter", [0, 1, 3])
@pytest.mark.parametrize("cells", SHAPES)
def test_exact_preserves_a_constant_map(cells: Cells, n_iter: int) -> None:
    x = torch.tensor([1.0, -2, 0.5, 3]).expand(1, cells.grid[0] * cells.grid[1], 4)
    result = run(x, cells, "exact", n_iter)[2]
    torch.testing.assert_close(result, x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("value", "channels"), [(1.0, 4), (0.5, 64)])
def test_released_shrinks_values_at_the_border(value: float, channels: int) -> None:
    """The published figures, for logits of value²·√C = 2: a corner keeps 4e² / (4e² + 5) of its value."""

    def kept(size: int) -> Tensor:
        x = torch.full((1, size * size, channels), value)
        return (run(x, Cells((size, size), (8, 8)), "released")[2] / value)[0, :, 0].view(size, size)

    whole, cut = kept(56), kept(57)
    assert round(whole[0, 0].item(), 3) == 0.855
    assert round(whole.min().item(), 3) == 0.855
    assert whole[28, 28].item() == pytest.approx(1, abs=1e-6)
    assert round(cut[0, 0].item(), 3) == 0.855
    assert round(cut.min().item(), 3) == 0.317
    assert cut.min() == cut[-1, -1]


@pytest.mark.parametrize("cells", SHAPES)
def test_weights_sum_to_one(cells: Cells) -> None:
    """The exact form gives no weight to cells outside the map, nor to padding."""
    (p, q), (h, w) = cells.count, cells.cell
    x = 3 * randn(2, cells.grid[0] * cells.grid[1], 4, seed=3)
    released = super_token_association(x, cells, border="released")
    assert released.shape == (2, p * q, h * w, 9)
    assert_close(released.sum(3), torch.ones(2, p * q, h * w))
    exact = super_token_association(x, cells, border="exact")
    assert_close(from_cells(exact.sum(3, keepdim=True), cells), torch.ones(2, x.shape[1], 1))
    assert_close(exact.sum((1, 2, 3)), torch.full((2,), x.shape[1]))
    for k in range(p * q):
        for i, (dy, dx) in enumerate(STEPS):
            if not (0 <= k // q + dy < p and 0 <= k % q + dx < q):
                assert not exact[:, k, :, i].any()


@pytest.mark.parametrize("border", BORDERS)
def test_extreme_values_stay_finite(border: Border) -> None:
    cells = Cells((13, 11), (4, 4))
    x = 300 * randn(1, 143, 8, seed=5, dtype=torch.float32)
    for part in run(x, cells, border, 3):
        assert torch.isfinite(part).all()
    for part in run(torch.zeros(1, 143, 8), cells, border, 3):
        assert torch.isfinite(part).all()


@EXAMPLES
@given(
    grid=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    cell=st.tuples(st.integers(1, 15), st.integers(1, 15)),
)
def test_cells_cover_the_grid(grid: tuple[int, int], cell: tuple[int, int]) -> None:
    cells = Cells(grid, cell)
    (p, q), (bottom, right) = cells.count, cells.padding
    assert (p * cell[0], q * cell[1]) == (grid[0] + bottom, grid[1] + right)
    assert 0 <= bottom < cell[0]
    assert 0 <= right < cell[1]
    x = randn(2, grid[0] * grid[1], 3)
    assert torch.equal(from_cells(to_cells(x, cells), cells), x)
    # ⟨neighbours(s), t⟩ = ⟨s, add_to_neighbours(t)⟩
    supers, parts = randn(2, p * q, 3, seed=1), randn(2, p * q, 9, 3, seed=2)
    left = (neighbours(supers, (p, q)) * parts).sum()
    assert_close(left, (supers * add_to_neighbours(parts, (p, q))).sum())


@pytest.mark.parametrize("border", BORDERS)
def test_no_tensor_of_size_n_times_k_is_made(border: Border) -> None:
    """4096 tokens and 256 super tokens: an N×K matrix has 1,048,576 elements, the association 36,864."""
    cells, c = Cells((64, 64), (4, 4)), 8
    x = randn(1, 4096, c).requires_grad_()
    with LargestTensor() as largest:
        run(x, cells, border, 2)[2].sum().backward()
    assert largest.numel == 9 * 4096, largest.operation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("border", BORDERS)
def test_low_precision_tokens_are_summed_in_float32(dtype: torch.dtype, border: Border) -> None:
    """Cells of 1600 tokens: a bfloat16 sum of ones would stop growing at 256."""
    cells = Cells((120, 120), (40, 40))
    x = (1 + randn(1, 14_400, 2, seed=6)).to(dtype)
    association, supers, back = run(x, cells, border)
    expected = run(x.double(), cells, border)
    assert association.dtype == torch.float32
    assert supers.dtype == dtype
    assert back.dtype == dtype
    assert_close(association, expected[0])
    assert_close(supers, expected[1])
    assert_close(back, expected[2])


@pytest.mark.parametrize("border", BORDERS)
def test_layout_and_autocast_change_nothing_and_images_are_independent(border: Border) -> None:
    x, cells = randn(3, 35, 4, seed=8, dtype=torch.float32), Cells((5, 7), (2, 3))
    before, expected = x.clone(), run(x, cells, border)
    for other in layouts(x):
        assert_same_leaves(run(other, cells, border), expected)
    shared = x[:1].expand(3, 35, 4)
    assert_same_leaves(run(shared, cells, border), run(shared.clone(), cells, border))
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_leaves(run(x, cells, border), expected)
    assert torch.equal(x, before)
    x[0] = torch.nan
    assert_same_leaves([part[1:] for part in run(x, cells, border)], [part[1:] for part in expected])
    assert run(x[:0], cells, border)[2].shape == (0, 35, 4)


def test_gradients() -> None:
    """The association has none; gather and scatter have one also for a given association."""
    cells = Cells((3, 5), (2, 2))
    x = randn(2, 15, 3, seed=9).requires_grad_()
    supers = randn(2, 6, 3, seed=10).requires_grad_()
    association = (rand(2, 6, 4, 9, seed=11) + 0.1).requires_grad_()
    assert not super_token_association(x, cells).requires_grad
    check = torch.autograd.gradcheck
    assert check(lambda x, a: super_token_gather(x, a, cells), (x, association), fast_mode=True)
    assert check(lambda s, a: super_token_scatter(s, a, cells), (supers, association), fast_mode=True)


@pytest.mark.parametrize("border", BORDERS)
def test_compile_to_one_graph(border: Border) -> None:
    x, cells = randn(2, 35, 4, seed=12), Cells((5, 7), (2, 3))
    assert_same_leaves(compiled(run)(x, cells, border, 2), run(x, cells, border, 2))


@pytest.mark.slow
def test_one_graph_for_every_size() -> None:
    """The second size makes the graph symbolic."""
    one_graph = compiled(run)
    for grid in ((5, 7), (8, 12)):
        x, cells = randn(2, grid[0] * grid[1], 4, seed=12), Cells(grid, (2, 3))
        assert_same_leaves(one_graph(x, cells, "exact"), run(x, cells, "exact"))


def test_invalid_arguments() -> None:
    x, cells = torch.zeros(1, 35, 4), Cells((5, 7), (2, 3))
    with pytest.raises(ValueError, match="n_iter=-1"):
        super_token_association(x, cells, n_iter=-1)
    with pytest.raises(ValueError, match="border='loose' is neither 'released' nor 'exact'"):
        super_token_association(x, cells, border="loose")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x has 35 tokens, but the grid \(5, 8\) has 40"):
        super_token_association(x, Cells((5, 8), (2, 3)))
