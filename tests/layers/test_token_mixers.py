"""The token transformer and its rivals, against their equations token by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from visualtokens.layers import TokenGraphConv, TokenLinear, TokenTransformer

from .helpers import assert_near, randomised, slow_token_conv, softmax


def normalised(norm: nn.Module, x: Tensor) -> Tensor:
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    return ((x - norm.running_mean.double()) * scale + norm.bias.double()).detach()


def slow_transformer(layer: TokenTransformer, tokens: Tensor, attn_dim: int) -> Tensor:
    """VT Eq. 3, 4 on ``tokens (L, C)``."""
    key, query = slow_token_conv(layer.key, tokens), slow_token_conv(layer.query, tokens)
    seen = torch.zeros_like(tokens)
    for i in range(len(tokens)):
        weights = softmax(torch.stack([key[i] @ query[j] for j in range(len(tokens))]) / math.sqrt(attn_dim))
        for j in range(len(tokens)):
            seen[i] += weights[j] * tokens[j]
    middle = tokens + normalised(layer.norm, seen)
    hidden = slow_token_conv(layer.ffn1, middle).clamp_min(0)
    return middle + slow_token_conv(layer.ffn2, hidden)


@pytest.mark.parametrize("groups", [1, 2, 4])
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


def test_no_mixing_equals_its_equation_and_mixes_nothing() -> None:
    torch.manual_seed(0)
    layer = randomised(TokenLinear(12))
    tokens = torch.randn(2, 5, 12)
    for image, out in zip(tokens.double(), layer(tokens), strict=True):
        assert_near(out, image + slow_token_conv(layer.conv, image))
    changed = tokens.clone()
    changed[:, 0] += 1
    assert torch.equal(layer(changed)[:, 1:], layer(tokens)[:, 1:])


@pytest.mark.parametrize("train", [True, False])
def test_the_transformer_starts_as_the_identity(train: bool) -> None:
    layer = TokenTransformer(24, hidden=20, attn_dim=8).train(train)
    tokens = torch.randn(2, 5, 24)
    assert torch.equal(layer(tokens), tokens)


def test_graph_convolution_starts_without_a_graph() -> None:
    torch.manual_seed(0)
    graph, alone = TokenGraphConv(12, tokens=5).eval(), TokenLinear(12).eval()
    alone.conv.load_state_dict(graph.conv.state_dict())
    tokens = torch.randn(2, 5, 12)
    assert torch.equal(graph(tokens), alone(tokens))


@pytest.mark.parametrize(
    "layer", [TokenTransformer(24, attn_dim=8), TokenGraphConv(24, tokens=5), TokenLinear(24)]
)
def test_every_parameter_gets_a_gradient(layer: nn.Module) -> None:
    layer.train()(torch.randn(2, 5, 24)).square().sum().backward()
    assert [n for n, p in layer.named_parameters() if p.grad is None] == []
