"""What the tests of the operations share: random inputs, memory layouts, and the sizes of tensors made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)
MANY_EXAMPLES = settings(EXAMPLES, max_examples=300)  # for what only a few in a hundred inputs show

# What a result may differ from the float64 reference by, relative and absolute.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def randint(high: int, *shape: int, seed: int = 0, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Any, dtype: torch.dtype | None = None) -> None:
    """Compare in float64, with the tolerance of ``dtype`` (that of ``actual`` unless given)."""
    tolerance = TOLERANCE[dtype or actual.dtype]
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.detach().double(), expected, rtol=tolerance, atol=tolerance)


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same ``(B, N, C)`` values in other memory layouts."""
    b, n, c = x.shape
    yield "transposed", x.mT.contiguous().mT  # what `map.flatten(2).mT` of a (B, C, H, W) map is
    strided = x.new_full((b, 2 * n, 3 * c), torch.nan)
    strided[:, ::2, ::3] = x
    yield "strided", strided[:, ::2, ::3]
    channels_last = x.mT.unflatten(2, (1, n)).contiguous(memory_format=torch.channels_last)
    yield "channels_last", channels_last.flatten(2).mT
    yield "batch_inside", x.transpose(0, 1).contiguous().transpose(0, 1)


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor that any operation inside the block returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.operation = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.numel() > self.numel:
                self.numel, self.operation = leaf.numel(), str(func)
        return out


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One graph without breaks; the backend traces forward and backward but runs PyTorch's own kernels.

    Starts afresh, because a function that was compiled before for other sizes gets symbolic ones.
    """
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def assert_same_leaves(actual: Any, expected: Any) -> None:
    """Every tensor of two (named) tuples: integers equal, floats to the tolerance of their dtype."""
    actual, expected = tree_leaves(actual), tree_leaves(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert a.shape == e.shape
        if a.is_floating_point():
            assert_close(a, e)
        else:
            assert torch.equal(a, e)
