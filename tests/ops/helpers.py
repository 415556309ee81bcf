"""Shared by the tests of the operations: random inputs, memory layouts, comparisons, and tensor sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

EXAMPLES = settings(max_examples=25, deadline=None, derandomize=True)
MANY_EXAMPLES = settings(EXAMPLES, max_examples=150)  # for faults that only a few percent of inputs show

# Relative and absolute tolerance of a comparison with a float64 reference.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def randint(high: int, *shape: int, seed: int = 0, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Any, dtype: torch.dtype | None = None) -> None:
    """Compare in float64, with the tolerance of ``dtype`` (by default that of ``actual``)."""
    tolerance = TOLERANCE[dtype or actual.dtype]
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.detach().double(), expected, rtol=tolerance, atol=tolerance)


def assert_same_leaves(actual: Any, expected: Any) -> None:
    """Compare all tensors of two (named) tuples: integers exactly, floats to the tolerance of their dtype."""
    actual, expected = tree_leaves(actual), tree_leaves(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert a.shape == e.shape
        if a.is_floating_point():
            assert_close(a, e)
        else:
            assert torch.equal(a, e)


def layouts(x: Tensor) -> Iterator[Tensor]:
    """The values of ``x (B, N, C)`` in other memory layouts."""
    b, n, c = x.shape
    yield x.mT.contiguous().mT  # the layout of `map.flatten(2).mT` of a (B, C, H, W) map
    strided = x.new_full((b, 2 * n, 3 * c), torch.nan)
    strided[:, ::2, ::3] = x
    yield strided[:, ::2, ::3]
    yield x.transpose(0, 1).contiguous().transpose(0, 1)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation in the block returned."""

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
    """``function`` as one graph without breaks; the backend traces it but runs PyTorch's own kernels.

    Resets dynamo first: a function that was compiled before for another size would get symbolic sizes.
    """
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")
