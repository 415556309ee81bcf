"""Convolutions between token-wise layers: 1×1 with BatchNorm, depth-wise residual, and the ConvFFN.

Patches are a sequence ``(B, N, C)`` or a map ``(B, C, H, W)``. A contiguous sequence and a channels-last map
share one memory layout, so neither direction copies, and convolutions run channels-last throughout.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from visualtokens.errors import UserError


def to_map(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Views the sequence ``(B, N, C)`` as a channels-last map ``(B, C, H, W)``."""
    return x.unflatten(1, grid).permute(0, 3, 1, 2)


def to_tokens(x: Tensor) -> Tensor:
    """Views the map ``(B, C, H, W)`` as a sequence ``(B, N, C)``."""
    return x.flatten(2).mT


def channels_last(x: Tensor) -> Tensor:
    """Returns the map ``(B, C, H, W)`` in the memory layout of a contiguous sequence."""
    return x.contiguous(memory_format=torch.channels_last)


class PixelConv(nn.Module):
    """1×1 convolution without bias, then BatchNorm: ``(B, C_in, H, W)`` to ``(B, C, H, W)``."""

    def __init__(self, dim_in: int, dim: int, *, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim_in, dim, 1, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(dim)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


def pixel_groups(channels: int, *, width: int = 64) -> int:
    """Returns the largest number of groups that divides ``channels`` into at least ``width`` each, or 1."""
    return next(g for g in range(max(1, channels // width), 0, -1) if channels % g == 0)


class TokenConv(nn.Module):
    """1×1 convolution without bias, then BatchNorm, over tokens: ``(B, K, C_in)`` to ``(B, K, C)``.

    Equals ``nn.Conv1d`` on ``(B, C_in, K)`` without the two transpositions. ``zero_init`` starts the
    BatchNorm weight at zero, so that a residual branch starts as the identity.
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
        parts = tokens.unflatten(2, (self.groups, -1))  # (B, K, groups, C_in / groups)
        weight = self.weight.unflatten(0, (self.groups, -1))  # (groups, C / groups, C_in / groups)
        out = torch.einsum("bkgi,goi->bkgo", parts, weight).flatten(2)  # (B, K, C)
        return normalise_tokens(self.norm, out)

    def extra_repr(self) -> str:
        dim, part = self.weight.shape
        return f"{part * self.groups}, {dim}, groups={self.groups}"


def normalise_tokens(norm: nn.Module, tokens: Tensor) -> Tensor:
    """BatchNorm of ``tokens (B, K, C)`` with one mean and variance per channel, over images and tokens.

    ``norm`` is a plain ``nn.BatchNorm1d``, which SyncBatchNorm's converter recognises.
    """
    return norm(tokens.flatten(0, 1)).unflatten(0, tokens.shape[:2])


class ResidualConv(nn.Conv2d):
    """x + dwconv3×3(x) on ``(B, C, H, W)``: STViT's conditional position encoding."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.add_(x) if y.dtype == x.dtype else x + y  # under autocast the dtypes can differ


class ConvFFN(nn.Module):
    """Feed-forward network with a convolution: fc2(GELU(dwconv3×3(fc1(x)))) on ``(B, N, C)``.

    ``residual`` adds the input of the convolution to its output. ``gelu_first`` moves GELU before the
    convolution. PVTv2 and PaCa-ViT use neither or ``residual``, STViT uses both.
    """

    def __init__(self, dim: int, *, expansion: int, residual: bool = False, gelu_first: bool = False) -> None:
        super().__init__()
        self.hidden = hidden = dim * expansion
        self.residual, self.gelu_first = residual, gelu_first
        self.fc1 = nn.Linear(dim, hidden)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """``x (B, N, C)`` on its grid (H, W)."""
        maps = x.unflatten(1, grid)  # (B, H, W, C)
        hidden_bytes = self.hidden * x.element_size()  # of one patch
        if _strips_are_cheaper(x, hidden_bytes):
            out = self.compute_strips(maps, make_strips(x.shape[0], grid, hidden_bytes))
        else:
            out = self.compute(maps)
        return out.flatten(1, 2)

    def compute(self, maps: Tensor, rows: slice = slice(None)) -> Tensor:
        """The network on ``maps (B, H, W, C)``; returns only ``rows`` of them."""
        hidden = self.fc1(maps)  # (B, H, W, expansion · C)
        if self.gelu_first:
            hidden = _gelu(hidden)
        mixed = self.dwconv(hidden.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)[:, rows]
        if self.residual:
            mixed = _add(mixed, hidden[:, rows])
        return self.fc2(mixed if self.gelu_first else F.gelu(mixed))

    def compute_strips(self, maps: Tensor, strips: Sequence[Strip]) -> Tensor:
        """:meth:`compute` strip by strip; training keeps only ``maps`` and recomputes each strip.

        The hidden map is 4 to 8 times as wide as the input, by far the largest tensor of these models. On
        one core, strips are 2.5 times as fast at 8×56×56 patches and 2.2 times at 1×320×200; training is
        1.4 and 1.3 times as fast in a fifth of the memory.
        """
        out = []
        for part, strip in zip(_Cut.apply(maps, strips), strips, strict=True):
            if torch.is_grad_enabled():
                # No layer is random, so there is no generator state to restore.
                y = checkpoint(self.compute, part, strip.inner, use_reentrant=False, preserve_rng_state=False)
            else:
                y = self.compute(part, strip.inner)
            out.append(y.flatten(0, 2))
        return torch.cat(out).view(maps.shape)


def _gelu(x: Tensor) -> Tensor:
    """GELU; in place during inference, so that the hidden map is not written twice."""
    return F.gelu(x) if _keeps_inputs() else torch.ops.aten.gelu_(x)


def _add(x: Tensor, y: Tensor) -> Tensor:
    """x + y; in place during inference."""
    return x + y if _keeps_inputs() else x.add_(y)


def _keeps_inputs() -> bool:
    return torch.is_grad_enabled() or torch.compiler.is_compiling()


# Size of one strip's hidden map. 4 to 8 MB measured best: it stays in the cache, and malloc reuses such
# blocks. Those above 32 MB are mapped anew each time, and their page faults cost more than the arithmetic.
STRIP_BYTES = 8 * 2**20


class Strip(NamedTuple):
    """Rows ``first`` to ``last`` (exclusive) of some images of a batch."""

    images: slice
    first: int
    last: int
    height: int  # rows of the whole map

    @property
    def rows(self) -> slice:
        """The strip's rows and, where the map has them, the adjacent rows that a 3×3 kernel reads."""
        return slice(max(self.first - 1, 0), min(self.last + 1, self.height))

    @property
    def inner(self) -> slice:
        """The strip's own rows within :attr:`rows`."""
        above = self.first - self.rows.start
        return slice(above, above + self.last - self.first)


def make_strips(batch: int, grid: tuple[int, int], bytes_per_patch: int) -> list[Strip]:
    """Returns strips of at most ``STRIP_BYTES``: several whole images, or some rows of one (at least one)."""
    height, width = grid
    images = STRIP_BYTES // (height * width * bytes_per_patch)
    if images:
        return [Strip(slice(i, i + images), 0, height, height) for i in range(0, batch, images)]
    max_rows = max(1, STRIP_BYTES // (width * bytes_per_patch))
    count = -(-height // max_rows)
    bounds = [height * i // count for i in range(count + 1)]  # evenly spaced
    return [
        Strip(slice(i, i + 1), first, last, height)
        for i in range(batch)
        for first, last in itertools.pairwise(bounds)
    ]


def _strips_are_cheaper(x: Tensor, bytes_per_patch: int) -> bool:
    """Whether the hidden map of ``x (B, N, C)`` exceeds two strips, and strips are supported.

    A compiler plans the memory of training itself, GPUs need large kernels, and torch.func does not support
    checkpointing. In a compiled graph of static shape already a second strip pays off.
    """
    if not x.is_cpu or torch._C._are_functorch_transforms_active():
        return False
    size = x.shape[0] * x.shape[1] * bytes_per_patch
    if not torch.compiler.is_compiling():
        return size > 2 * STRIP_BYTES and not _is_fake()
    from torch.fx.experimental.symbolic_shapes import has_static_value  # slow to import

    return not torch.is_grad_enabled() and has_static_value(size) and size > STRIP_BYTES


def _is_fake() -> bool:
    """Whether tensors have no values, as when operations are counted: strips compute shared rows twice."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


class _Cut(torch.autograd.Function):
    """Views of ``maps (B, H, W, C)``, one per strip, with the adjacent rows.

    The backward pass of a slice allocates a whole map of zeros; here all strips accumulate in one. That
    makes training at 320×200 patches 1.3 times as fast.
    """

    @staticmethod
    def forward(maps: Tensor, strips: Sequence[Strip]) -> tuple[Tensor, ...]:
        return tuple(maps[strip.images, strip.rows] for strip in strips)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Sequence[Strip]], output: tuple[Tensor, ...]) -> None:
        ctx.shape, ctx.strips = inputs[0].shape, inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].new_zeros(ctx.shape)
        for strip, gradient in zip(ctx.strips, gradients, strict=True):
            total[strip.images, strip.rows] += gradient
        return total, None
