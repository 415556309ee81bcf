"""Numeric safeguards of all operations: optional input checks, and at least float32 for sums and products."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_checks_enabled = False


def set_checks(enabled: bool) -> bool:
    """Turn input checks (finite values, indices in range) on or off; return the previous setting.

    A check reads every value, so checks are off by default. Compiled graphs and tensors on the meta device
    are never checked.
    """
    global _checks_enabled
    previous, _checks_enabled = _checks_enabled, bool(enabled)
    return previous


def check_finite(operation: str, **values: object) -> None:
    """Raise a ValueError that names the first floating tensor with a NaN or an infinity, and its place."""
    if not _checks_enabled or torch.compiler.is_compiling():
        return
    for name, tensor in values.items():
        if not isinstance(tensor, Tensor) or tensor.is_meta or not tensor.is_floating_point():
            continue
        bad = ~torch.isfinite(tensor)
        if bad.any():
            first = _first(bad)
            raise ValueError(
                f"{operation}: {name} has {int(bad.sum())} of {bad.numel()} values that are not finite, "
                f"the first is {tensor[first].item()} at {first}; check how {name} is computed"
            )


def check_range(operation: str, name: str, index: Tensor, low: int, high: int) -> None:
    """Raise a ValueError that names the first index outside ``low`` to ``high`` (inclusive)."""
    if not _checks_enabled or index.is_meta or torch.compiler.is_compiling():
        return
    bad = (index < low) | (index > high)
    if bad.any():
        first = _first(bad)
        raise ValueError(f"{operation}: {name} is {index[first].item()} at {first}; expected {low} to {high}")


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64 tensors, float32 for all others."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def upcast(x: Tensor) -> Tensor:
    """``x`` in its :func:`accumulation_dtype`."""
    return x.to(accumulation_dtype(x))


def no_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Context in which matrix products on the device of ``x`` keep the dtype of their inputs."""
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()  # entering a disabled autocast is measurable at one image
