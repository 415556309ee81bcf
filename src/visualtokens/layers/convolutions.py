"""Patches as a sequence ``(B, N, C)`` and as a map ``(B, C, H, W)``: two views of the same memory.

A contiguous sequence is a channels-last map, so neither direction copies, and convolutions between
token-wise layers run channels-last throughout.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from visualtokens.errors import UserError


def to_map(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """``(B, N, C)`` to ``(B, C, H, W)`` in channels-last memory."""
    return x.unflatten(1, grid).permute(0, 3, 1, 2)


def to_tokens(x: Tensor) -> Tensor:
    """``(B, C, H, W)`` to ``(B, N, C)``."""
    return x.flatten(2).mT


# 1×1 convolutions of pixels and of tokens, each without bias and followed by its own BatchNorm.


def pixel_groups(channels: int, *, width: int = 64) -> int:
    """The most groups of at least ``width`` channels: C / 64 where that is whole, 1 below 128 channels."""
    return next(g for g in range(max(1, channels // width), 0, -1) if channels % g == 0)


class PixelConv(nn.Module):
    """``(B, C_in, H, W)`` to ``(B, C, H, W)``: a 1×1 convolution, then BatchNorm."""

    def __init__(self, dim_in: int, dim: int, *, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim_in, dim, 1, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(dim)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


def normalise_tokens(norm: nn.Module, tokens: Tensor) -> Tensor:
    """BatchNorm of tokens ``(B, L, C)``: one mean and variance per channel, over images and tokens.

    A function of a plain ``nn.BatchNorm1d``, so that what looks for BatchNorms finds one (SyncBatchNorm).
    """
    return norm(tokens.flatten(0, 1)).unflatten(0, tokens.shape[:2])


class TokenConv(nn.Module):
    """``(B, L, C_in)`` to ``(B, L, C)``: a 1×1 convolution over tokens, then BatchNorm.

    The same as ``nn.Conv1d`` on ``(B, C_in, L)``, without turning the tokens around and back.
    ``zero_init`` starts the BatchNorm's weight at zero, so that a residual branch starts as nothing.
    """

    def __init__(self, dim_in: int, dim: int, *, groups: int = 1, zero_init: bool = False) -> None:
        super().__init__()
        if dim_in % groups or dim % groups:
            raise UserError(f"groups={groups} does not divide {dim_in} and {dim} channels; give a divisor")
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(dim, dim_in // groups))
        self.norm = nn.BatchNorm1d(dim)
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        if zero_init:
            nn.init.zeros_(self.norm.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.groups == 1:
            return normalise_tokens(self.norm, F.linear(tokens, self.weight))
        parts = tokens.unflatten(2, (self.groups, -1))  # (B, L, groups, C_in / groups)
        weight = self.weight.unflatten(0, (self.groups, -1))  # (groups, C / groups, C_in / groups)
        out = torch.einsum("blgi,goi->blgo", parts, weight).flatten(2)  # (B, L, C)
        return normalise_tokens(self.norm, out)

    def extra_repr(self) -> str:
        dim, part = self.weight.shape
        return f"{part * self.groups}, {dim}, groups={self.groups}"


# A depth-wise convolution that adds its input.


class ResidualConv(nn.Conv2d):
    """x + conv(x), 3×3 and depth-wise, on ``(B, C, H, W)``: STViT's conditional position encoding."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.add_(x) if y.dtype == x.dtype else x + y  # in place; autocast may have changed its type


# The feed-forward network with a depth-wise convolution (PVTv2, PaCa-ViT, STViT), strip by strip.
#
# Its hidden map is 4 to 8 times as wide as its input, by far the largest tensor of these models. Large maps
# are processed in strips: some whole images, or some rows of one. Measured on one core against the whole map
# at once: 2.5 times as fast at 8×56×56 patches, 2.2 times at 1×320×200; training 1.4 and 1.3 times as fast
# in a fifth of the memory, because only the input is kept, and a strip computed again when it is needed.

# 4 to 8 MB measured best: a strip and what becomes of it stay in the cache, and the C library serves such
# blocks from memory it holds; beyond 32 MB it asks the system for fresh pages, which cost more than the sums.
STRIP_BYTES = 8 * 2**20


class ConvFFN(nn.Module):
    """Linear, 3×3 depth-wise convolution, GELU, Linear, on ``(B, N, C)``.

    ``residual``: the convolution adds its own input. ``gelu_first``: GELU comes before the convolution.
    """

    def __init__(self, dim: int, *, expansion: int, residual: bool = False, gelu_first: bool = False) -> None:
        super().__init__()
        self.hidden = hidden = dim * expansion
        self.residual, self.gelu_first = residual, gelu_first
        self.fc1 = nn.Linear(dim, hidden)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        maps = x.unflatten(1, grid)  # (B, H, W, C)
        hidden_bytes = self.hidden * x.element_size()  # of one patch
        if not _worth_strips(x, hidden_bytes):
            return self.compute(maps, slice(None)).flatten(1, 2)
        strips = make_strips(x.shape[0], grid, hidden_bytes)
        run = functools.partial(_recomputed, self.compute) if torch.is_grad_enabled() else self.compute
        cut = zip(_Cut.apply(maps, strips), strips, strict=True)
        return torch.cat([run(part, strip.inner).flatten(0, 2) for part, strip in cut]).view(x.shape)

    def compute(self, x: Tensor, inner: slice) -> Tensor:
        """The network on rows ``x (B, R, W, C)`` of a map, for those of them that are ``inner``."""
        # In place where nobody needs what was there: the largest map is not written a second time.
        fresh = torch.is_grad_enabled() or torch.compiler.is_compiling()
        hidden = self.fc1(x)  # (B, R, W, expansion · C)
        if self.gelu_first:
            hidden = F.gelu(hidden) if fresh else torch.ops.aten.gelu_(hidden)
        mixed = self.dwconv(hidden.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)[:, inner]
        if self.residual:
            mixed = mixed + hidden[:, inner] if fresh else mixed.add_(hidden[:, inner])
        return self.fc2(mixed if self.gelu_first else F.gelu(mixed))


class Strip(NamedTuple):
    """Rows ``first`` to ``last`` (exclusive) of some images of a batch."""

    images: slice
    first: int
    last: int
    height: int  # rows of the whole map

    @property
    def rows(self) -> slice:
        """The strip's rows and the neighbours that a 3×3 kernel needs, where the map has them."""
        return slice(max(self.first - 1, 0), min(self.last + 1, self.height))

    @property
    def inner(self) -> slice:
        """The strip's own rows among :attr:`rows`."""
        above = self.first - self.rows.start
        return slice(above, above + self.last - self.first)


def make_strips(batch: int, grid: tuple[int, int], bytes_per_patch: int) -> list[Strip]:
    """Strips of at most ``STRIP_BYTES``: several whole images, or some rows of one (at least one row)."""
    height, width = grid
    images = STRIP_BYTES // (height * width * bytes_per_patch)
    if images:
        return [Strip(slice(i, i + images), 0, height, height) for i in range(0, batch, images)]
    most = max(1, STRIP_BYTES // (width * bytes_per_patch))
    count = -(-height // most)
    ends = [height * i // count for i in range(count + 1)]  # rows spread evenly
    return [
        Strip(slice(i, i + 1), first, last, height)
        for i in range(batch)
        for first, last in itertools.pairwise(ends)
    ]


def _worth_strips(x: Tensor, bytes_per_patch: int) -> bool:
    """Whether the hidden map is larger than two strips, in a pass that strips can speed up.

    A compiler plans the memory of training itself, a GPU wants large pieces, and the transforms of
    torch.func do not support checkpointing. In a compiled graph of fixed size a second strip is cut for free.
    """
    if not x.is_cpu or torch._C._are_functorch_transforms_active():
        return False
    size = x.shape[0] * x.shape[1] * bytes_per_patch
    if not torch.compiler.is_compiling():
        return size > 2 * STRIP_BYTES and not _without_values()
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # only compiling needs it

    return not torch.is_grad_enabled() and statically_known_true(size > STRIP_BYTES)


def _without_values() -> bool:
    """Whether somebody counts operations: rows that neighbouring strips share are no part of the model."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _recomputed(run: Callable[[Tensor, slice], Tensor], x: Tensor, inner: slice) -> Tensor:
    """``run(x, inner)``, keeping nothing but x for the backward pass. There is no randomness to keep."""
    return checkpoint(run, x, inner, use_reentrant=False, preserve_rng_state=False)


class _Cut(torch.autograd.Function):
    """A map ``(B, H, W, C)`` as its strips with their neighbours, all of them views.

    Slicing would give the same, but in backward every slice is a map of zeros; here all strips add to one
    (training at 320×200 patches: 1.3 times as fast).
    """

    @staticmethod
    def forward(maps: Tensor, strips: Sequence[Strip]) -> tuple[Tensor, ...]:
        return tuple(maps[strip.images, strip.rows] for strip in strips)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Sequence[Strip]], output: tuple[Tensor, ...]) -> None:
        ctx.shape, ctx.strips = inputs[0].shape, inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = gradients[0].new_zeros(ctx.shape)
        for strip, gradient in zip(ctx.strips, gradients, strict=True):
            whole[strip.images, strip.rows] += gradient
        return whole, None
