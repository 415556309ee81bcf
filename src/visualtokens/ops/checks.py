"""Optional checking of what goes into the operations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_enabled = False


def set_checks(enabled: bool) -> bool:
    """Turn the checks for non-finite inputs on or off; returns what they were before.

    They read every value, so they are off by default. Compiled graphs never check.
    """
    global _enabled
    before, _enabled = _enabled, bool(enabled)
    return before


def check_range(operation: str, name: str, index: Tensor, low: int, high: int) -> None:
    """Name the first index outside ``low`` to ``high``."""
    if not _enabled or torch.compiler.is_compiling():
        return
    bad = (index < low) | (index > high)
    if bad.any():
        first = tuple(int(i) for i in bad.nonzero()[0])
        raise ValueError(f"{operation}: {name} is {index[first].item()} at {first}; expected {low} to {high}")


def check_finite(operation: str, **values: object) -> None:
    """Name the first floating tensor that holds a NaN or an infinity, and where."""
    if not _enabled or torch.compiler.is_compiling():
        return
    for name, tensor in values.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            continue
        bad = ~torch.isfinite(tensor)
        if bad.any():
            first = tuple(int(i) for i in bad.nonzero()[0])
            raise ValueError(
                f"{operation}: {name} has {int(bad.sum())} of {bad.numel()} values that are not finite, "
                f"the first is {tensor[first].item()} at {first}; look at what produced {name}"
            )


# Distances and sums in the precision of their tensors, whatever autocast says.


def own_precision(x: Tensor) -> AbstractContextManager[None]:
    """Products as precise as ``x``. Where there is no autocast to switch off, this costs next to nothing."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()
