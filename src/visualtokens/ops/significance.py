"""How much attention a token receives."""

from __future__ import annotations

import torch
from torch import Tensor


def significance(attention: Tensor) -> Tensor:
    """Σ over heads and queries of ``attention (B, heads, queries, N)``: ``(B, N)``, at least float32."""
    dtype = torch.float64 if attention.dtype == torch.float64 else torch.float32
    return attention.sum(dim=(1, 2), dtype=dtype)
