"""The token mixers and the projector against their equations, token by token and pixel by pixel."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from visualtokens import record_groupings
from visualtokens.layers import Projector, TokenGraphConv, TokenLinear, TokenTransformer

from ..ops.helpers import LargestTensor
from .helpers import GRIDS, assert_near, pixels, randomised, slow_pixel_conv, slow_token_conv, softmax


def normalised(norm: nn.Module, x: Tensor) -> Tensor:
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    return ((x - norm.running_mean.double()) * scale + norm.bias.double()).detach()


def slow_transformer(layer: TokenTransformer, tokens: Tensor, attn_dim: int) -> Tensor:
    """VT Eq. 3, 4 on ``tokens (K, C)``."""
    key, query = slow_token_conv(layer.key, tokens), slow_token_conv(layer.query, tokens)
    attended = torch.zeros_like(tokens)
    for i in range(len(tokens)):
        weights = softmax(torch.stack([key[i] @ query[j] for j in range(len(tokens))]) / math.sqrt(attn_dim))
        for j in range(len(tokens)):
            attended[i] += weights[j] * tokens[j]
    middle = tokens + normalised(layer.norm, attended)
    hidden = slow_token_conv(layer.ffn1, middle).clamp_min(0)
    return middle + slow_token_conv(layer.ffn2, hidden)


@pytest.mark.parametrize("groups", [1, 4])
def test_transformer_equals_the_equations(groups: int) -> None:
    torch.manual_seed(0)
    layer = randomised(TokenTransformer(24, hidden=20, attn_dim=8, groups=groups))
    tokens = torch.randn(2, 5, 24)
    expected = torch.stack([slow_transformer(layer, t.double(), 8) for t in tokens])
    assert_near(layer(tokens), expected)


def test_graph_convolution_equals_its_equation() -> None:
    torch.manual_seed(0)
    layer = randomised(TokenGraphConv(12, tokens=5))
    nn.init.normal_(layer.graph, std=0.5)
    tokens = torch.randn(2, 5, 12)
    mixing = torch.eye(5, dtype=torch.float64) - layer.graph.detach().double()
    for image, out in zip(tokens.double(), layer(tokens), strict=True):
        mixed = torch.stack([sum(mixing[i, j] * image[j] for j in range(5)) for i in range(5)])
        assert_near(out, image + slow_token_conv(layer.conv, mixed))


def test_token_linear_equals_its_equation_and_mixes_nothing() -> None:
    torch.manual_seed(0)
    layer = randomised(TokenLinear(12))
    tokens = torch.randn(2, 5, 12)
    for image, out in zip(tokens.double(), layer(tokens), strict=True):
        assert_near(out, image + slow_token_conv(layer.conv, image))
    changed = tokens.clone()
    changed[:, 0] += 1
    assert torch.allclose(layer(changed)[:, 1:], layer(tokens)[:, 1:], atol=1e-6)


@pytest.mark.parametrize("train", [True, False])
def test_transformer_starts_as_the_identity(train: bool) -> None:
    layer = TokenTransformer(24, hidden=20, attn_dim=8).train(train)
    tokens = torch.randn(2, 5, 24)
    assert torch.equal(layer(tokens), tokens)


def test_graph_convolution_starts_without_mixing() -> None:
    assert not TokenGraphConv(12, tokens=5).graph.any()


@pytest.mark.parametrize(
    "layer", [TokenTransformer(24, attn_dim=8), TokenGraphConv(24, tokens=5), TokenLinear(24)]
)
def test_every_parameter_of_a_mixer_gets_a_gradient(layer: nn.Module) -> None:
    layer.train()(torch.randn(2, 5, 24)).square().sum().backward()
    assert [n for n, p in layer.named_parameters() if p.grad is None] == []


def slow_projector(layer: Projector, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """VT Eq. 5 on ``x (C_in, H, W)`` and ``tokens (K, CT)``: the result ``(N, C)`` and weights ``(N, K)``."""
    widened = slow_pixel_conv(layer.widen, pixels(x))
    query, key = slow_pixel_conv(layer.query, widened), slow_token_conv(layer.key, tokens)
    value = slow_token_conv(layer.value, tokens)
    norm, out, all_weights = layer.norm, [], []
    for p in range(len(widened)):
        weights = softmax(torch.stack([query[p] @ k for k in key]) / math.sqrt(widened.shape[1]))
        update = sum(weights[j] * value[j] for j in range(len(value)))
        update = (update - norm.running_mean.double()) / (norm.running_var.double() + norm.eps).sqrt()
        out.append(widened[p] + (update * norm.weight.double() + norm.bias.double()).detach())
        all_weights.append(weights)
    return torch.stack(out), torch.stack(all_weights)


@pytest.mark.parametrize(
    ("grid", "dim_in", "dim", "token_dim"),
    [(GRIDS[0], 12, 128, 24), (GRIDS[1], 128, 128, 24), (GRIDS[2], 128, 128, 128)],
)
def test_projector_equals_the_equation(grid: tuple[int, int], dim_in: int, dim: int, token_dim: int) -> None:
    torch.manual_seed(0)
    layer = randomised(Projector(dim_in, dim, token_dim=token_dim))
    x, tokens = torch.randn(2, dim_in, *grid), torch.randn(2, 5, token_dim)
    with record_groupings(layer) as groupings:
        out = layer(x, tokens)
    assert out.shape == (2, dim, *grid)
    for i in range(2):
        expected, weights = slow_projector(layer, x[i], tokens[i].double())
        assert_near(out[i], expected.T.unflatten(1, grid))
        assert_near(groupings["tap"].weights[i], weights)


@pytest.mark.parametrize("train", [True, False])
def test_projector_starts_as_the_identity(train: bool) -> None:
    layer = Projector(16, token_dim=24).train(train)
    x = torch.randn(2, 16, 3, 5)
    assert torch.equal(layer(x, torch.randn(2, 7, 24)), x)


def test_memory_layout_of_the_projector_input() -> None:
    torch.manual_seed(0)
    layer = randomised(Projector(16, 128, token_dim=24))
    x, tokens = torch.randn(2, 16, 3, 5), torch.randn(2, 7, 24)
    expected = layer(x, tokens)
    assert torch.allclose(layer(x.contiguous(memory_format=torch.channels_last), tokens), expected, atol=1e-5)
    assert torch.allclose(layer(x.mT.contiguous().mT, tokens), expected, atol=1e-5)


def test_every_parameter_of_the_projector_gets_a_gradient() -> None:
    layer = Projector(16, 32, token_dim=24).train()
    layer(torch.randn(2, 16, 3, 5), torch.randn(2, 7, 24)).square().sum().backward()
    assert [n for n, p in layer.named_parameters() if p.grad is None] == []


def test_memory_of_the_projector_is_linear_in_the_pixels() -> None:
    layer = randomised(Projector(16, token_dim=24))
    largest = []
    for size in (32, 64):
        with torch.no_grad(), LargestTensor() as recorder:
            layer(torch.randn(1, 16, size, size), torch.randn(1, 7, 24))
        largest.append(recorder.numel)
    assert largest == [16 * 32 * 32, 16 * 64 * 64]
