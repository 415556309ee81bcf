"""The tokenizers against their equations, pixel by pixel; unusual maps, precision, memory, registration."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens import record_groupings
from visualtokens.errors import UserError
from visualtokens.layers import (
    ClusterTokenizer,
    FilterTokenizer,
    PoolTokenizer,
    RecurrentTokenizer,
    register_tokenizer,
    tokenizers,
)
from visualtokens.layers.tokenizers import Centroids
from visualtokens.ops import cell_grid

from ..ops.helpers import LargestTensor
from .helpers import GRIDS, assert_near, pixels, randomised, slow_pixel_conv, slow_token_conv, softmax

TOKENS, TOKEN_DIM = 4, 24


class Recurrent(nn.Module):
    """A recurrent tokenizer with fixed previous tokens, to be called like the others."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = RecurrentTokenizer(dim, token_dim=TOKEN_DIM)

    def forward(self, x: Tensor) -> Tensor:
        previous = torch.randn(1, TOKENS, TOKEN_DIM, generator=torch.Generator().manual_seed(3))
        return self.inner(x, previous.expand(len(x), -1, -1))


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "filter": lambda dim: FilterTokenizer(dim, tokens=TOKENS, token_dim=TOKEN_DIM),
    "recurrent": Recurrent,
    "cluster": lambda dim: ClusterTokenizer(dim, tokens=TOKENS, token_dim=TOKEN_DIM),
    "pool": lambda dim: PoolTokenizer(dim, tokens=TOKENS, token_dim=TOKEN_DIM),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def build(kind: str, dim: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return randomised(KINDS[kind](dim))


def slow_pool(logits: Tensor, value: Tensor, embed: nn.Module) -> tuple[Tensor, Tensor]:
    """The tokens ``(K, CT)`` and weights ``(N, K)`` of ``logits (N, K)`` and ``value (N, C)``."""
    weights = torch.stack([softmax(logits[:, j]) for j in range(logits.shape[1])], dim=1)
    means = [sum(weights[p, j] * value[p] for p in range(len(value))) for j in range(weights.shape[1])]
    return slow_token_conv(embed, torch.stack(means)), weights


def check(layer: nn.Module, x: Tensor, slow: Callable[[int], tuple[Tensor, Tensor]], *more: Tensor) -> None:
    """Compares the layer's tokens and recorded weights with those that ``slow`` returns for each image."""
    with record_groupings(layer) as groupings:
        out = layer(x, *more)
    (grouping,) = groupings.values()
    assert grouping.grid == tuple(x.shape[2:])
    for i in range(len(x)):
        tokens, weights = slow(i)
        assert_near(out[i], tokens)
        assert_near(grouping.weights[i], weights)


@pytest.mark.parametrize(("grid", "value"), [(GRIDS[0], False), (GRIDS[1], True), (GRIDS[2], True)])
def test_filter_equals_the_equation(grid: tuple[int, int], value: bool) -> None:
    torch.manual_seed(0)
    layer = randomised(FilterTokenizer(128, tokens=3, token_dim=8, value=value))
    x = torch.randn(2, 128, *grid)

    def slow(i: int) -> tuple[Tensor, Tensor]:
        image = pixels(x[i])
        logits = slow_pixel_conv(layer.filter, image) / math.sqrt(128)
        return slow_pool(logits, slow_pixel_conv(layer.value, image), layer.embed)

    check(layer, x, slow)


@pytest.mark.parametrize("grid", GRIDS[:2])
def test_recurrent_equals_the_equation(grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = randomised(RecurrentTokenizer(128, token_dim=8))
    x, previous = torch.randn(2, 128, *grid), torch.randn(2, 3, 8)

    def slow(i: int) -> tuple[Tensor, Tensor]:
        image = pixels(x[i])
        query, key = slow_token_conv(layer.query, previous[i].double()), slow_pixel_conv(layer.key, image)
        logits = torch.stack([torch.stack([q @ k for q in query]) for k in key]) / math.sqrt(128)  # (N, K)
        return slow_pool(logits, slow_pixel_conv(layer.value, image), layer.embed)

    check(layer, x, slow, previous)


def cells(k: int, grid: tuple[int, int]) -> list[list[int]]:
    """Returns the pixels of each of K cells, which overlap where K does not divide the grid."""
    rows, columns = cell_grid(k, grid)
    return [
        [
            y * grid[1] + x
            for y in range(r * grid[0] // rows, -(-(r + 1) * grid[0] // rows))
            for x in range(c * grid[1] // columns, -(-(c + 1) * grid[1] // columns))
        ]
        for r in range(rows)
        for c in range(columns)
    ]


def slow_centroids(image: Tensor, k: int, grid: tuple[int, int], iterations: int) -> Tensor:
    """Listing 1 of the appendix without its bugs, on ``image (N, C)``: unit vectors ``(K, C)``."""
    unit = torch.stack([x / x.norm() for x in image])
    if k >= len(unit):
        return torch.stack([unit[j % len(unit)] for j in range(k)])
    centres = [image[cell].mean(0) for cell in cells(k, grid)]  # line 8: before lines 11 and 12 normalise
    centres = [c / c.norm() for c in centres]
    for _ in range(iterations):
        nearest = [min(range(k), key=lambda j: float((x - centres[j]).norm())) for x in unit]
        for j in range(k):
            members = [x for x, a in zip(unit, nearest, strict=True) if a == j]
            if members:
                mean = torch.stack(members).mean(0)
                centres[j] = mean / mean.norm()
    return torch.stack(centres)


@pytest.mark.parametrize(
    ("grid", "value"), [((5, 6), False), ((2, 9), True), ((1, 3), False), ((1, 1), False)]
)
def test_cluster_equals_the_equation(grid: tuple[int, int], value: bool) -> None:
    torch.manual_seed(0)
    layer = randomised(ClusterTokenizer(128, tokens=4, token_dim=8, value=value))
    x = 3 * torch.randn(2, 128, *grid)

    def slow(i: int) -> tuple[Tensor, Tensor]:
        image = pixels(x[i])
        logits = image @ slow_centroids(image, 4, grid, iterations=5).T / math.sqrt(128)
        return slow_pool(logits, slow_pixel_conv(layer.value, image), layer.embed)

    check(layer, x, slow)


@pytest.mark.parametrize(
    ("grid", "value"), [((4, 4), True), ((5, 7), False), ((1, 3), False), ((1, 1), False)]
)
def test_pool_equals_the_means_of_cells(grid: tuple[int, int], value: bool) -> None:
    torch.manual_seed(0)
    layer = randomised(PoolTokenizer(128, tokens=4, token_dim=8, value=value))
    x = torch.randn(2, 128, *grid)

    def slow(i: int) -> tuple[Tensor, Tensor]:
        value_map, weights = slow_pixel_conv(layer.value, pixels(x[i])), torch.zeros(math.prod(grid), 4)
        for j, cell in enumerate(cells(4, grid)):
            weights[cell, j] = 1 / len(cell)
        means = torch.stack([value_map[cell].mean(0) for cell in cells(4, grid)])
        return slow_token_conv(layer.embed, means), weights.double()

    check(layer, x, slow)


@pytest.mark.parametrize(("tokens", "shape"), [(16, (4, 4)), (8, (2, 4)), (32, (4, 8))])
def test_pooling_cells_of_a_square_map(tokens: int, shape: tuple[int, int]) -> None:
    layer = PoolTokenizer(3, tokens=tokens, token_dim=8).eval()
    with record_groupings(layer) as groupings:
        layer(torch.randn(1, 3, 16, 16))
    first = groupings["tap"].maps()[0, 0] > 0
    assert (16 // int(first.any(1).sum()), 16 // int(first.any(0).sum())) == shape


@every_kind
@pytest.mark.parametrize("grid", [(7, 14), (10, 10), (1, 9), (1, 1)])
def test_number_of_tokens_does_not_depend_on_the_map(kind: str, grid: tuple[int, int]) -> None:
    layer = build(kind)
    with record_groupings(layer) as groupings:
        out = layer(torch.randn(2, 16, *grid))
    assert out.shape == (2, TOKENS, TOKEN_DIM)
    assert torch.isfinite(out).all()
    (grouping,) = groupings.values()
    assert grouping.weights.shape == (2, math.prod(grid), TOKENS)
    assert torch.allclose(grouping.weights.sum(1), torch.ones(2, TOKENS), atol=1e-5)


@every_kind
@pytest.mark.parametrize("name", ["zeros", "constant", "two colours", "huge", "tiny values"])
def test_maps_without_structure(kind: str, name: str) -> None:
    noise = torch.randn(2, 16, 5, 5, generator=torch.Generator().manual_seed(1))
    halves = noise[:, :, :1, :1].expand(-1, -1, 5, 5).clone()
    halves[:, :, 2:] = noise[:, :, 4:, 4:]
    maps = {
        "zeros": torch.zeros_like(noise),
        "constant": noise[:, :, :1, :1].expand_as(noise),
        "two colours": halves,
        "huge": noise * 1e4,
        "tiny values": noise * 1e-30,
    }
    x = maps[name].clone().requires_grad_()
    out = build(kind)(x)
    assert out.shape == (2, TOKENS, TOKEN_DIM)
    assert torch.isfinite(out).all()
    out.sum().backward()
    assert torch.isfinite(x.grad).all()


def test_two_colours_are_two_clusters() -> None:
    x = torch.zeros(1, 2, 4, 6)
    x[:, 0, :, :2], x[:, 1, :, 2:] = 3.0, 5.0
    centres = Centroids(2)(x)
    assert torch.allclose(centres, torch.eye(2).unsqueeze(0))


def test_centroids_start_from_means_of_pixels_that_are_then_normalised() -> None:
    """VT Listing 1: a long pixel weighs more in the mean of its cell than a short one."""
    x = torch.zeros(1, 2, 1, 4)
    x[0, :, 0] = torch.tensor([[9.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]])
    centres = Centroids(2, iterations=0)(x)
    expected = F.normalize(torch.tensor([[4.5, 0.5], [0.5, 0.5]]), dim=1)
    assert torch.allclose(centres[0], expected)


def test_centroids_are_deterministic_unit_vectors_without_gradient() -> None:
    x = torch.randn(2, 8, 5, 6, requires_grad=True)
    centroids = Centroids(4)
    assert not centroids(x).requires_grad
    assert torch.equal(centroids(x), centroids(x))
    assert torch.allclose(centroids(x), centroids(7 * x), atol=1e-6)
    assert torch.allclose(centroids(x).norm(dim=2), torch.ones(2, 4), atol=1e-6)
    few = centroids(x[:, :, :1, :3])
    assert torch.equal(few[:, 3], few[:, 0])  # fewer pixels than tokens: repeated


@every_kind
def test_every_parameter_gets_a_gradient(kind: str) -> None:
    layer = build(kind).train()
    layer(torch.randn(2, 16, 3, 5)).square().sum().backward()
    assert [n for n, p in layer.named_parameters() if p.grad is None] == []


@every_kind
def test_memory_layout_does_not_matter(kind: str) -> None:
    layer, x = build(kind), torch.randn(2, 16, 3, 5)
    expected = layer(x)
    assert torch.allclose(layer(x.contiguous(memory_format=torch.channels_last)), expected, atol=1e-5)
    assert torch.allclose(layer(x.mT.contiguous().mT), expected, atol=1e-5)


@every_kind
def test_sums_over_many_pixels_are_precise_under_autocast(kind: str) -> None:
    """At 200×304 pixels a uniform weight is 1.6e-5; a sum in bfloat16 would stop far below one."""
    layer = build(kind, dim=4)
    means = []
    embed = next(m for n, m in layer.named_modules() if n.endswith("embed"))
    embed.register_forward_pre_hook(lambda _, inputs: means.append(inputs[0].float()))
    value = getattr(layer, "inner", layer).value
    if not isinstance(value, nn.Identity):
        nn.init.zeros_(value.conv.weight)
        value.norm.running_mean.zero_()
        nn.init.ones_(value.norm.bias)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        layer(torch.ones(1, 4, 200, 304))
    assert torch.allclose(means[0], torch.ones_like(means[0]), atol=4e-3)


@every_kind
def test_memory_is_linear_in_the_pixels(kind: str) -> None:
    layer, largest = build(kind), []
    for size in (32, 64):
        with torch.no_grad(), LargestTensor() as recorder:
            layer(torch.randn(1, 16, size, size))
        largest.append(recorder.numel)
    assert largest == [16 * 32 * 32, 16 * 64 * 64]


def test_zero_tokens_is_an_error() -> None:
    for kind in (FilterTokenizer, ClusterTokenizer, PoolTokenizer):
        with pytest.raises(UserError, match="tokens=0; give at least 1"):
            kind(8, tokens=0)


class MaxTokenizer(nn.Module):
    """As many copies of the maximum over all pixels as tokens are asked for."""

    def __init__(self, dim: int, *, tokens: int, token_dim: int, value: bool) -> None:
        super().__init__()
        self.tokens = tokens
        self.embed = nn.Linear(dim, token_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x.amax((2, 3))).unsqueeze(1).expand(-1, self.tokens, -1)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "_factories", dict(tokenizers._factories))
    register_tokenizer("max", MaxTokenizer)


@pytest.mark.usefixtures("registered")
def test_registered_tokenizer_is_an_option_of_models() -> None:
    model = timm.create_model("vt_resnet18", tokenizer="max", tokens=5, width=0.25, num_classes=3)
    assert isinstance(model.vt.blocks[0].tokenizer, MaxTokenizer)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 3)
    assert model.forward_features(torch.randn(2, 3, 64, 64)).shape == (2, 5, 256)


@pytest.mark.usefixtures("registered")
def test_registered_names_are_unique() -> None:
    with pytest.raises(UserError, match="'max' is already registered; choose another name"):
        register_tokenizer("max", FilterTokenizer)
