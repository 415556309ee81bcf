"""Shared by the layer tests: random BatchNorm statistics, and 1×1 convolutions as plain loops."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

Layer = TypeVar("Layer", bound=nn.Module)

GRIDS = [(3, 4), (1, 7), (1, 1)]


def randomised(layer: Layer, *, seed: int = 0) -> Layer:
    """Returns the layer in evaluation mode, with random BatchNorm statistics as after training."""
    generator = torch.Generator().manual_seed(seed)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator)

    for module in layer.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.copy_(0.3 * noise(module.running_mean))
            module.running_var.copy_(noise(module.running_var).square() + 0.5)
            with torch.no_grad():
                module.weight.copy_(1 + 0.3 * noise(module.weight))
                module.bias.copy_(0.3 * noise(module.bias))
    return layer.eval()


def slow_conv(x: Tensor, weight: Tensor, norm: nn.Module, groups: int = 1) -> Tensor:
    """1×1 convolution and BatchNorm in evaluation mode, value by value: ``x (P, C_in)`` to ``(P, C)``."""
    weight = weight.detach().flatten(1).double()  # (C, C_in / groups)
    outputs, part = weight.shape
    out = torch.zeros(len(x), outputs, dtype=torch.float64)
    for o in range(outputs):
        group = o // (outputs // groups)
        inputs = x[:, group * part : (group + 1) * part]
        for p in range(len(x)):
            y = (weight[o] * inputs[p]).sum()
            y = (y - norm.running_mean[o].double()) / (norm.running_var[o].double() + norm.eps).sqrt()
            out[p, o] = y * norm.weight[o].double() + norm.bias[o].double()
    return out.detach()


def slow_pixel_conv(layer: nn.Module, x: Tensor) -> Tensor:
    """A ``PixelConv`` or ``nn.Identity`` on ``x (P, C)``."""
    if isinstance(layer, nn.Identity):
        return x
    return slow_conv(x, layer.conv.weight, layer.norm, layer.conv.groups)


def slow_token_conv(layer: nn.Module, tokens: Tensor) -> Tensor:
    """A ``TokenConv`` or ``nn.Identity`` on ``tokens (K, C)``."""
    if isinstance(layer, nn.Identity):
        return tokens
    return slow_conv(tokens, layer.weight, layer.norm, layer.groups)


def softmax(values: Tensor) -> Tensor:
    return values.exp() / values.exp().sum()


def pixels(x: Tensor) -> Tensor:
    """Returns one image ``(C, H, W)`` as pixels ``(N, C)`` in float64."""
    return x.detach().flatten(1).T.double()


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual.detach().double(), expected, rtol=tolerance, atol=tolerance)
