"""Super token attention against a loop over tokens and their nine neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from visualtokens.errors import UserError
from visualtokens.grouping import record_groupings
from visualtokens.layers import SuperTokenAttention

# Grid, cell, n_iter, border: whole and cut cells, a single row, and plain self-attention.
CASES = [
    ((4, 6), (2, 2), 1, "exact"),
    ((4, 6), (2, 2), 3, "released"),
    ((5, 8), (2, 3), 1, "released"),
    ((5, 8), (2, 3), 1, "exact"),
    ((5, 8), (2, 3), 3, "released"),
    ((5, 8), (2, 3), 3, "exact"),
    ((1, 7), (2, 2), 2, "released"),
    ((1, 7), (2, 2), 2, "exact"),
    ((3, 4), (1, 1), 1, "exact"),
]


class Reference:
    """STViT Algo. 1 for one image, token by token; ``exact`` ignores the zero padding of cut cells."""

    def __init__(self, attention: SuperTokenAttention, grid: tuple[int, int]) -> None:
        self.attention, self.grid = attention, grid
        (height, width), (h, w) = grid, attention.cell
        self.count = -(-height // h), -(-width // w)
        self.exact = attention.border == "exact"
        rows, columns = grid if self.exact else (self.count[0] * h, self.count[1] * w)
        self.positions = [(y, z) for y in range(rows) for z in range(columns)]

    def token(self, x: Tensor, position: tuple[int, int]) -> Tensor:
        y, z = position
        return x[:, y, z] if y < self.grid[0] and z < self.grid[1] else torch.zeros_like(x[:, 0, 0])

    def cell(self, position: tuple[int, int]) -> tuple[int, int]:
        return position[0] // self.attention.cell[0], position[1] // self.attention.cell[1]

    def around(self, position: tuple[int, int]) -> list[tuple[int, int]]:
        y, z = self.cell(position)
        return [(y + dy, z + dz) for dy in (-1, 0, 1) for dz in (-1, 0, 1)]

    def associate(self, x: Tensor, supers: dict[tuple[int, int], Tensor]) -> dict[tuple[int, int], Tensor]:
        found = {}
        for position in self.positions:
            token, logits = self.token(x, position), []
            for cell in self.around(position):
                outside = torch.tensor(-math.inf if self.exact else 0.0, dtype=x.dtype)
                logits.append(token @ supers[cell] / math.sqrt(len(token)) if cell in supers else outside)
            found[position] = torch.stack(logits).softmax(0)
        return found

    def gather(self, x: Tensor, association: dict[tuple[int, int], Tensor]) -> dict[tuple[int, int], Tensor]:
        cells = [(p, q) for p in range(self.count[0]) for q in range(self.count[1])]
        supers = {}
        for cell in cells:
            total, weight = torch.zeros_like(x[:, 0, 0]), 0.0
            for position in self.positions:
                for i, near in enumerate(self.around(position)):
                    if near == cell:
                        total = total + association[position][i] * self.token(x, position)
                        weight = weight + association[position][i]
            supers[cell] = total / (weight + 1e-12)
        return supers

    def attend(self, supers: Tensor) -> Tensor:
        """Multi-head self-attention of ``(K, C)``; the channels of qkv are ordered by head."""
        mix = self.attention.mix
        qkv = (supers @ mix.qkv.weight.T + mix.qkv.bias).unflatten(1, (mix.heads, 3, -1))
        heads = []
        for h in range(mix.heads):
            q, k, v = qkv[:, h].unbind(1)
            heads.append((q @ k.T / math.sqrt(q.shape[1])).softmax(1) @ v)
        return torch.cat(heads, 1) @ mix.proj.weight.T + mix.proj.bias

    def __call__(self, x: Tensor) -> Tensor:
        """``(C, H, W)`` to the same."""
        if self.attention.cell == (1, 1):
            return self.attend(x.flatten(1).T).T.reshape(x.shape)
        with torch.no_grad():
            means: dict[tuple[int, int], list[Tensor]] = {}
            for position in self.positions:
                means.setdefault(self.cell(position), []).append(self.token(x, position))
            supers = {cell: torch.stack(tokens).mean(0) for cell, tokens in means.items()}
            association = self.associate(x, supers)
            for _ in range(self.attention.n_iter - 1):
                association = self.associate(x, self.gather(x, association))
        found = self.gather(x, association)
        mixed = dict(zip(found, self.attend(torch.stack(list(found.values()))), strict=True))
        out = torch.zeros_like(x)
        for position in self.positions:
            if position[0] < self.grid[0] and position[1] < self.grid[1]:
                near = zip(association[position], self.around(position), strict=True)
                out[:, position[0], position[1]] = sum(a * mixed[cell] for a, cell in near if cell in mixed)
        return out


def attention(cell: tuple[int, int], **options: object) -> SuperTokenAttention:
    torch.manual_seed(0)
    return SuperTokenAttention(6, heads=2, cell=cell, **options).double()


def gradients(out: Tensor, x: Tensor, module: SuperTokenAttention) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    return list(torch.autograd.grad((out * weights).sum(), [x, *module.parameters()]))


@pytest.mark.parametrize(("grid", "cell", "n_iter", "border"), CASES)
def test_attention_equals_the_loop(
    grid: tuple[int, int], cell: tuple[int, int], n_iter: int, border: str
) -> None:
    module = attention(cell, n_iter=n_iter, border=border)
    x = (2 * torch.randn(2, 6, *grid, dtype=torch.float64)).requires_grad_()
    reference = Reference(module, grid)
    expected = torch.stack([reference(image) for image in x])
    out = module(x)
    assert torch.allclose(out, expected, atol=1e-10)
    for ours, theirs in zip(gradients(out, x, module), gradients(expected, x, module), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-9)


@pytest.mark.parametrize(("grid", "n_iter"), [((56, 56), 1), ((33, 65), 3), ((1, 7), 3)])
def test_exact_border_preserves_a_constant_map(grid: tuple[int, int], n_iter: int) -> None:
    """Sampling and upsampling alone: the attention among super tokens is replaced by the identity."""
    module = SuperTokenAttention(8, heads=2, cell=(8, 8), n_iter=n_iter)
    module.mix.forward = lambda supers, grid: supers
    x = torch.randn(1, 8, 1, 1).expand(1, 8, *grid)
    assert torch.allclose(module(x), x, atol=1e-6)


def test_recorded_grouping_is_sparse() -> None:
    module = attention((4, 4)).float()
    with record_groupings(module) as groupings, torch.no_grad():
        module(torch.randn(2, 6, 9, 7))
    (grouping,) = groupings.values()
    assert grouping.weights.shape == (2, 63, 9)
    dense = grouping.dense()  # (B, N, K)
    assert dense.shape == (2, 63, 3 * 2)
    assert torch.allclose(dense.sum(2), torch.ones(()), atol=1e-6)
    assert torch.allclose(grouping.size, dense.sum(1).square() / dense.square().sum(1), rtol=1e-5)


def test_memory_layout_does_not_matter() -> None:
    module = attention((4, 4))
    x = torch.randn(2, 6, 9, 7, dtype=torch.float64)
    out = module(x.contiguous(memory_format=torch.channels_last))
    assert torch.allclose(out, module(x), atol=1e-12)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_position_bias_depends_on_the_offset() -> None:
    module = SuperTokenAttention(6, heads=2, cell=(1, 1), window=(3, 4))
    position = module.mix.position
    bias = position((3, 4)).view(2, 3, 4, 3, 4)
    for (y, z), (v, w) in [((0, 0), (1, 2)), ((1, 1), (2, 3)), ((2, 3), (0, 0)), ((2, 0), (2, 0))]:
        assert torch.equal(bias[:, y, z, v, w], position.table[:, y - v + 2, z - w + 3])
    assert position((5, 5)).shape == (2, 25, 25)  # interpolated


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(cell=(0, 4)), r"cell=\(0, 4\)"),
        (dict(n_iter=-1), "n_iter=-1"),
        (dict(border="periodic"), "border='periodic'"),
        (dict(heads=4), "heads=4"),
    ],
)
def test_invalid_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SuperTokenAttention(6, **({"heads": 2} | options))
