"""Layers with what stands around them folded into their weights, for inference.

A folded layer takes the place of another and keeps that one's parameters and buffers under their names, so
that the model's ``state_dict()`` stays what it was. What it computes with is made once, from those values:
so it neither trains nor loads weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.errors import UserError

MANY = 3000  # rows from which on a 1×1 convolution is faster than a matrix product


class Affine(NamedTuple):
    """x · scale + shift, per channel, in float64."""

    scale: Tensor  # (C,)
    shift: Tensor  # (C,)


def of_norm(norm: nn.BatchNorm2d) -> Affine:
    """What BatchNorm does in evaluation."""
    if norm.running_mean is None or norm.running_var is None:
        raise UserError("a BatchNorm without running statistics normalises by its batch and cannot be folded")
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -norm.running_mean.double() * scale
    return Affine(scale, shift if norm.bias is None else shift + norm.bias.detach().double())


def of_scale(gamma: Tensor) -> Affine:
    """What a layer scale does."""
    scale = gamma.detach().double()
    return Affine(scale, torch.zeros_like(scale))


class Folded(nn.Module):
    """In the place of a layer that another one does the work of: hands its input on."""

    folded_weight: Tensor
    folded_bias: Tensor

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, parameter in original.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in original.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self._original = (original,)  # in a tuple, so that it is not a child
        self.training = False
        self.register_load_state_dict_pre_hook(_refuse_to_load)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def train(self, mode: bool = True) -> Folded:
        if mode:
            raise UserError("a fused model cannot train; call visualtokens.unfuse(model) first")
        return self

    def restore(self) -> nn.Module:
        """The layer that was here, with its values where they are now."""
        (original,) = self._original
        for name in original._parameters:
            if original._parameters[name] is not None:
                original._parameters[name] = self._parameters[name]
        for name in original._buffers:
            if original._buffers[name] is not None:
                original._buffers[name] = self._buffers[name]
        return original.train(False)

    def extra_repr(self) -> str:
        return type(self._original[0]).__name__


class FoldedLinear(Folded):
    """after(linear(before(x)))."""

    def __init__(
        self, linear: nn.Linear, *, before: Affine | None = None, after: Affine | None = None
    ) -> None:
        super().__init__(linear)
        weight, bias = linear.weight.detach().double(), _bias(linear)
        if before is not None:
            bias = bias + weight @ before.shift
            weight = weight * before.scale
        if after is not None:
            weight, bias = weight * after.scale.unsqueeze(1), bias * after.scale + after.shift
        _keep(self, linear.weight, weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cpu:
            return F.linear(x, self.folded_weight, self.folded_bias)
        # On a CPU, F.linear writes the bias first and then adds the product to it. These write only once.
        if x.numel() < MANY * x.shape[-1] or torch.compiler.is_compiling():
            return (x @ self.folded_weight.mT).add_(self.folded_bias)
        pixels = x.reshape(1, 1, -1, x.shape[-1]).permute(0, 3, 1, 2)  # (1, C, 1, N), channels-last
        y = F.conv2d(pixels, self.folded_weight[:, :, None, None], self.folded_bias)
        return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], -1)


class FoldedConv(Folded):
    """after(conv(x)); with ``residual``, after(x + conv(x)) of a depth-wise convolution."""

    def __init__(self, conv: nn.Conv2d, *, after: Affine | None = None, residual: bool = False) -> None:
        super().__init__(conv)
        self.residual = residual
        self.stride, self.padding, self.dilation, self.groups = (
            conv.stride,
            conv.padding,
            conv.dilation,
            conv.groups,
        )
        weight, bias = conv.weight.detach().double(), _bias(conv)
        if residual:
            weight = weight.clone()
            weight[:, :, conv.kernel_size[0] // 2, conv.kernel_size[1] // 2] += 1
        if after is not None:
            weight, bias = weight * after.scale.view(-1, 1, 1, 1), bias * after.scale + after.shift
        _keep(self, conv.weight, weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(
            x,
            self.folded_weight,
            self.folded_bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )


def _bias(layer: nn.Linear | nn.Conv2d) -> Tensor:
    if layer.bias is None:
        return layer.weight.new_zeros(layer.weight.shape[0], dtype=torch.float64)
    return layer.bias.detach().double()


def _keep(folded: Folded, like: Tensor, weight: Tensor, bias: Tensor) -> None:
    folded.register_buffer("folded_weight", weight.to(like.dtype), persistent=False)
    folded.register_buffer("folded_bias", bias.to(like.dtype), persistent=False)


def _refuse_to_load(*_: Any) -> None:
    raise UserError("a fused model cannot load weights; call visualtokens.unfuse(model) first")
