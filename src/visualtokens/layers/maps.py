"""Patches as a sequence ``(B, N, C)`` and as a map ``(B, C, H, W)``: two views of the same memory.

A contiguous sequence is a channels-last map, so neither direction copies, and convolutions between
token-wise layers run channels-last throughout.
"""

from __future__ import annotations

from torch import Tensor


def to_map(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """``(B, N, C)`` to ``(B, C, H, W)`` in channels-last memory."""
    return x.unflatten(1, grid).permute(0, 3, 1, 2)


def to_tokens(x: Tensor) -> Tensor:
    """``(B, C, H, W)`` to ``(B, N, C)``."""
    return x.flatten(2).mT
