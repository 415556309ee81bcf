"""The projector against Eq. 5, pixel by pixel."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from visualtokens import record_groupings
from visualtokens.layers import Projector

from ..ops.helpers import LargestTensor
from .helpers import GRIDS, assert_near, pixels, randomised, slow_pixel_conv, slow_token_conv, softmax


def slow_projector(layer: Projector, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """One image ``x (C_in, H, W)``, ``tokens (L, CT)``: the result and the weights, both ``(N, …)``."""
    seen = slow_pixel_conv(layer.widen, pixels(x))
    query, key = slow_pixel_conv(layer.query, seen), slow_token_conv(layer.key, tokens)
    value = slow_token_conv(layer.value, tokens)
    norm, out, all_weights = layer.norm, [], []
    for p in range(len(seen)):
        weights = softmax(torch.stack([query[p] @ k for k in key]) / math.sqrt(seen.shape[1]))
        answer = sum(weights[j] * value[j] for j in range(len(value)))
        answer = (answer - norm.running_mean.double()) / (norm.running_var.double() + norm.eps).sqrt()
        out.append(seen[p] + (answer * norm.weight.double() + norm.bias.double()).detach())
        all_weights.append(weights)
    return torch.stack(out), torch.stack(all_weights)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("dim_in", "dim", "token_dim"), [(12, 128, 24), (128, 128, 24), (128, 128, 128)])
def test_equals_the_equation(grid: tuple[int, int], dim_in: int, dim: int, token_dim: int) -> None:
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


def test_every_pixel_spreads_one_over_the_tokens() -> None:
    torch.manual_seed(0)
    layer = randomised(Projector(16, token_dim=24))
    with record_groupings(layer) as groupings:
        layer(torch.randn(2, 16, 3, 5), torch.randn(2, 7, 24))
    (grouping,) = groupings.values()
    assert grouping.grid == (3, 5)
    assert grouping.weights.shape == (2, 15, 7)
    assert torch.allclose(grouping.weights.sum(2), torch.ones(2, 15), atol=1e-5)


@pytest.mark.parametrize("train", [True, False])
def test_starts_as_the_identity(train: bool) -> None:
    layer = Projector(16, token_dim=24).train(train)
    x = torch.randn(2, 16, 3, 5)
    assert torch.equal(layer(x, torch.randn(2, 7, 24)), x)


def test_memory_layout_does_not_matter() -> None:
    torch.manual_seed(0)
    layer = randomised(Projector(16, 128, token_dim=24))
    x, tokens = torch.randn(2, 16, 3, 5), torch.randn(2, 7, 24)
    expected = layer(x, tokens)
    assert torch.allclose(layer(x.contiguous(memory_format=torch.channels_last), tokens), expected, atol=1e-5)
    assert torch.allclose(layer(x.mT.contiguous().mT, tokens), expected, atol=1e-5)


def test_every_parameter_gets_a_gradient() -> None:
    layer = Projector(16, 32, token_dim=24).train()
    layer(torch.randn(2, 16, 3, 5), torch.randn(2, 7, 24)).square().sum().backward()
    assert [n for n, p in layer.named_parameters() if p.grad is None] == []


def test_memory_is_linear_in_the_pixels() -> None:
    layer = randomised(Projector(16, token_dim=24))
    largest = []
    for size in (32, 64):
        with torch.no_grad(), LargestTensor() as recorder:
            layer(torch.randn(1, 16, size, size), torch.randn(1, 7, 24))
        largest.append(recorder.numel)
    assert largest == [16 * 32 * 32, 16 * 64 * 64]
