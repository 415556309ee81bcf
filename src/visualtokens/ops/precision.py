"""Distances and sums in the precision of their tensors, whatever autocast says."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def own_precision(x: Tensor) -> AbstractContextManager[None]:
    """Products as precise as ``x``. Where there is no autocast to switch off, this costs next to nothing."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()
