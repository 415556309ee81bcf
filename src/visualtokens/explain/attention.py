"""Who attends to whom, read while a model runs.

Fused attention never keeps its matrix, so it is computed beside it, from the same queries and keys. Where a
model spells its attention out, the matrix is a softmax over the last of four dimensions. Every model that
does one or the other can be read so, without a change to its code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from visualtokens.grouping import Grouping

SOFTMAX = (torch.softmax, Tensor.softmax, F.softmax)


@dataclass(frozen=True)
class Attended:
    """One attention of a forward pass."""

    weights: Tensor  # (B, N, M), the mean over the heads: how N queries attend to M keys
    tap: str | None  # the last grouping that was made before it


class _Recorder(TorchFunctionMode):
    def __init__(self, groupings: dict[str, Grouping], *, square: bool) -> None:
        super().__init__()
        self.groupings = groupings
        self.square = square
        self.found: list[Attended] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            self.note_fused(*args, **(kwargs or {}))
        elif func in SOFTMAX and out.ndim == 4 and _dimension(*args, **(kwargs or {})) in (-1, 3):
            self.note(out.detach().float())
        return out

    def note_fused(self, query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> None:
        if self.wants(query.shape[-2], key.shape[-2]):
            self.note(_weights(query, key, *more, **options))

    def note(self, weights: Tensor) -> None:
        """Of ``(B, heads, N, M)``."""
        if self.wants(*weights.shape[2:]):
            self.found.append(Attended(weights.mean(1), next(reversed(self.groupings), None)))

    def wants(self, queries: int, keys: int) -> bool:
        return self.square or queries != keys


@contextlib.contextmanager
def record_attention(groupings: dict[str, Grouping], *, square: bool = True) -> Iterator[list[Attended]]:
    """Collect every attention of the calling thread's forward passes inside the block, in order.

    ``groupings`` is what :func:`~visualtokens.record_groupings` fills meanwhile; an empty one will do.
    Without ``square``, those with as many queries as keys, which take the most memory, are left out.
    """
    recorder = _Recorder(groupings, square=square)
    with recorder:
        yield recorder.found


def _dimension(*args: Any, dim: int | None = None, **options: Any) -> int | None:
    """Over which dimension a softmax goes, from its arguments."""
    return args[1] if len(args) > 1 else dim


def _weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q kᵀ · scale + mask), ``(B, heads, N, M)``; the arguments are those of the fused one."""
    query, key = query.detach().float(), key.detach().float()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)  # (B, heads, N, M)
    if is_causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        logits = logits + attn_mask
    return logits.softmax(-1)
