"""Super token attention against a loop over tokens and their nine neighbours, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from visualtokens.errors import UserError
from visualtokens.grouping import record_groupings
from visualtokens.layers import SuperTokenAttention

BORDERS = ["released", "exact"]
GRIDS = [((8, 12), (4, 4)), ((9, 7), (4, 4)), ((5, 11), (2, 3)), ((1, 7), (2, 2)), ((3, 4), (1, 1))]


class Reference:
    """STViT Algo. 1 for one image, token by token. Zeros fill cut cells up; ``exact`` leaves them out."""

    def __init__(self, attention: SuperTokenAttention, grid: tuple[int, int]) -> None:
        self.attention, self.grid = attention, grid
        (height, width), (h, w) = grid, attention.cell
        self.count = -(-height // h), -(-width // w)
        self.exact = attention.border == "exact"
        rows, columns = grid if self.exact else (self.count[0] * h, self.count[1] * w)
        self.places = [(y, z) for y in range(rows) for z in range(columns)]

    def token(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        y, z = place
        return x[:, y, z] if y < self.grid[0] and z < self.grid[1] else torch.zeros_like(x[:, 0, 0])

    def cell(self, place: tuple[int, int]) -> tuple[int, int]:
        return place[0] // self.attention.cell[0], place[1] // self.attention.cell[1]

    def around(self, place: tuple[int, int]) -> list[tuple[int, int]]:
        y, z = self.cell(place)
        return [(y + dy, z + dz) for dy in (-1, 0, 1) for dz in (-1, 0, 1)]

    def associate(self, x: Tensor, supers: dict[tuple[int, int], Tensor]) -> dict[tuple[int, int], Tensor]:
        found = {}
        for place in self.places:
            token, logits = self.token(x, place), []
            for cell in self.around(place):
                outside = torch.tensor(-math.inf if self.exact else 0.0, dtype=x.dtype)
                logits.append(token @ supers[cell] / math.sqrt(len(token)) if cell in supers else outside)
            found[place] = torch.stack(logits).softmax(0)
        return found

    def gather(self, x: Tensor, association: dict[tuple[int, int], Tensor]) -> dict[tuple[int, int], Tensor]:
        cells = [(p, q) for p in range(self.count[0]) for q in range(self.count[1])]
        supers = {}
        for cell in cells:
            total, weight = torch.zeros_like(x[:, 0, 0]), 0.0
            for place in self.places:
                for i, near in enumerate(self.around(place)):
                    if near == cell:
                        total = total + association[place][i] * self.token(x, place)
                        weight = weight + association[place][i]
            supers[cell] = total / (weight + 1e-12)
        return supers

    def attend(self, supers: Tensor) -> Tensor:
        """Multi-head self-attention of ``(K, C)``; the channels of qkv go head by head."""
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
            for place in self.places:
                means.setdefault(self.cell(place), []).append(self.token(x, place))
            supers = {cell: torch.stack(tokens).mean(0) for cell, tokens in means.items()}
            association = self.associate(x, supers)
            for _ in range(self.attention.n_iter - 1):
                association = self.associate(x, self.gather(x, association))
        found = self.gather(x, association)
        mixed = dict(zip(found, self.attend(torch.stack(list(found.values()))), strict=True))
        out = torch.zeros_like(x)
        for place in self.places:
            if place[0] < self.grid[0] and place[1] < self.grid[1]:
                near = zip(association[place], self.around(place), strict=True)
                out[:, place[0], place[1]] = sum(a * mixed[cell] for a, cell in near if cell in mixed)
        return out


def attention(cell: tuple[int, int], **options: object) -> SuperTokenAttention:
    torch.manual_seed(0)
    return SuperTokenAttention(6, heads=2, cell=cell, **options).double()


def gradients(out: Tensor, x: Tensor, module: SuperTokenAttention) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    return list(torch.autograd.grad((out * weights).sum(), [x, *module.parameters()]))


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("n_iter", [1, 2, 3])
@pytest.mark.parametrize(("grid", "cell"), GRIDS)
def test_equals_the_loop_forward_and_backward(
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


@pytest.mark.parametrize("grid", [(56, 56), (57, 57), (33, 65), (1, 7)])
@pytest.mark.parametrize("n_iter", [1, 3])
def test_exact_gives_a_constant_map_back(grid: tuple[int, int], n_iter: int) -> None:
    """Without the attention in between: it is replaced by handing the super tokens on."""
    module = SuperTokenAttention(8, heads=2, cell=(8, 8), n_iter=n_iter)
    module.mix.forward = lambda supers, grid: supers
    x = torch.randn(1, 8, 1, 1).expand(1, 8, *grid)
    assert torch.allclose(module(x), x, atol=1e-6)


def test_recording_hands_out_the_sparse_form_and_a_dense_view() -> None:
    module = attention((4, 4)).float()
    x = torch.randn(2, 6, 9, 7)
    with record_groupings(module) as found, torch.no_grad():
        module(x)
    (grouping,) = found.values()
    assert grouping.weights.shape == (2, 63, 9)
    assert grouping.dense().shape == (2, 63, 3 * 2)
    assert torch.allclose(grouping.dense().sum(2), torch.ones(()), atol=1e-6)
    alone = module.grouping(x)
    assert torch.equal(alone.weights, grouping.weights)
    assert torch.equal(alone.size, grouping.size)


def test_memory_layout_does_not_matter() -> None:
    module = attention((4, 4))
    x = torch.randn(2, 6, 9, 7, dtype=torch.float64)
    out = module(x.contiguous(memory_format=torch.channels_last))
    assert torch.allclose(out, module(x), atol=1e-12)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_position_bias_follows_the_offset() -> None:
    """Two tokens at the same offset from each other share their bias, on another grid interpolated."""
    module = SuperTokenAttention(6, heads=2, cell=(1, 1), window=(3, 4))
    position = module.mix.position
    bias = position((3, 4)).view(2, 3, 4, 3, 4)
    for (y, z), (v, w) in [((0, 0), (1, 2)), ((1, 1), (2, 3)), ((2, 3), (0, 0)), ((2, 0), (2, 0))]:
        assert torch.equal(bias[:, y, z, v, w], position.table[:, y - v + 2, z - w + 3])
    assert position((5, 5)).shape == (2, 25, 25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(cell=(0, 4)), r"cell=\(0, 4\)"),
        (dict(n_iter=0), "n_iter=0"),
        (dict(border="periodic"), "border='periodic'"),
        (dict(heads=4), "heads=4"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SuperTokenAttention(6, **({"heads": 2} | options))


def test_plain_attention_has_no_grouping() -> None:
    with pytest.raises(UserError, match="makes no super tokens"):
        attention((1, 1)).grouping(torch.randn(1, 6, 4, 4))
