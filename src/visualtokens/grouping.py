"""Groupings: which patches belong to which token, and how to record them from a running model.

Each layer that assigns patches to tokens passes its weights through a :class:`Tap`. Outside
:func:`record_groupings` a tap costs nothing. Inside, the groupings of one model are collected by the names of
their taps, and no state is kept on the modules.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Grouping:
    """Assignment of N patches to K tokens.

    Dense form: ``weights (B, N, K)``. Sparse form: ``weights (B, N, J)`` with ``index (B, N, J)``, the
    token of each weight, -1 for none; J = 1 is a hard assignment, J = 9 are STViT's neighbours.
    :meth:`dense`, :meth:`maps` and :meth:`hard` work on both forms.
    """

    weights: Tensor  # (B, N, K), or (B, N, J) with an index
    grid: tuple[int, int]  # (H, W) with H·W = N
    size: Tensor  # (B, K): patches per token
    index: Tensor | None = None  # (B, N, J)

    @classmethod
    def soft(cls, weights: Tensor, grid: tuple[int, int]) -> Grouping:
        """Grouping of dense ``weights (B, N, K)``; the size of a token is (Σw)² / Σw².

        This effective number of patches is s for equal weights on s patches, as in a hard grouping.
        """
        with (
            torch.no_grad()
        ):  # the size has no gradient, and gradient checkpointing must not save tensors for it
            w = weights.float()
            size = w.sum(1).square() / w.square().sum(1).clamp_min(torch.finfo(torch.float32).tiny)  # (B, K)
        return cls(weights, grid, size)

    @classmethod
    def hard_from(cls, assignment: Tensor, tokens: int, grid: tuple[int, int]) -> Grouping:
        """Grouping of ``assignment (B, N)``, the token index of each patch, -1 for none."""
        present = (assignment >= 0).to(torch.float32)  # (B, N)
        size = present.new_zeros(assignment.shape[0], max(tokens, 1))
        size = size.scatter_add(1, assignment.clamp_min(0), present)[:, :tokens]  # (B, K)
        return cls(present.unsqueeze(-1), grid, size, assignment.unsqueeze(-1))

    @property
    def tokens(self) -> int:
        """K."""
        return self.size.shape[1]

    def dense(self) -> Tensor:
        """Weights ``(B, N, K)``, computed on demand for the sparse form."""
        if self.index is None:
            return self.weights
        b, n, _ = self.weights.shape
        out = self.weights.new_zeros(b, n, self.tokens + 1)  # the last column collects the index -1
        index = torch.where(self.index < 0, self.tokens, self.index)
        return out.scatter_add(2, index, self.weights)[:, :, : self.tokens]

    def maps(self) -> Tensor:
        """One map of weights per token, ``(B, K, H, W)``."""
        return self.dense().mT.unflatten(2, self.grid)

    def hard(self) -> Tensor:
        """Token of highest weight of each patch ``(B, N)``, the lowest index on ties, -1 for none."""
        if self.index is None:
            if self.tokens == 0:
                return self.weights.new_full(self.weights.shape[:2], -1, dtype=torch.long)
            strongest, token = self.weights.max(2)
            return torch.where(strongest > 0, token, -1)
        best = self.weights.argmax(2, keepdim=True)  # (B, N, 1)
        token = self.index.gather(2, best).squeeze(2)
        return torch.where(self.weights.amax(2) > 0, token, -1)


class Tap(nn.Module):
    """Identity module at which :func:`record_groupings` reads a grouping.

    It has no parameters and no state, and disappears from compiled graphs.
    """

    def forward(
        self, weights: Tensor, grid: tuple[int, int], size: Tensor | None = None, index: Tensor | None = None
    ) -> Tensor:
        if self.wanted():
            if size is None and index is not None:
                raise ValueError("a sparse grouping needs the number of tokens: give size (B, K)")
            grouping = Grouping.soft(weights, grid) if size is None else Grouping(weights, grid, size, index)
            for recorder in _recorders.get():
                recorder.add(self, grouping)
        return weights

    def wanted(self) -> bool:
        """Whether this tap is being recorded; skip costly inputs of the tap if not."""
        if torch.compiler.is_compiling():
            return False
        recorders = _recorders.get()
        return bool(recorders) and not _in_backward() and any(self in r.names for r in recorders)


class _Recorder:
    def __init__(self, model: nn.Module, *, detach: bool) -> None:
        self.names = {m: name for name, m in model.named_modules() if isinstance(m, Tap)}
        self.detach = detach
        self.groupings: dict[str, Grouping] = {}

    def add(self, tap: Tap, g: Grouping) -> None:
        if tap not in self.names:
            return
        if self.detach:
            index = None if g.index is None else g.index.detach()
            g = Grouping(g.weights.detach(), g.grid, g.size.detach(), index)
        self.groupings[self.names[tap]] = g


# A context variable is local to its thread, so that two threads can record the same model at the same time.
_recorders: ContextVar[tuple[_Recorder, ...]] = ContextVar("visualtokens_recorders", default=())


def _in_backward() -> bool:
    """Whether autograd is running: gradient checkpointing repeats the forward pass, which is not recorded."""
    return torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def record_groupings(model: nn.Module, *, detach: bool = True) -> Iterator[dict[str, Grouping]]:
    """Collect the groupings of all forward passes inside the block.

    >>> with record_groupings(model) as groupings:
    ...     model(images)
    >>> groupings["stages.0.blocks.0.attn.tap"].maps()   # (B, K, H, W)

    The keys are the names of the model's taps, in the order of execution; a later pass overwrites an
    earlier one. Only the calling thread is recorded. A compiled model runs uncompiled inside the block,
    because compiled graphs have no taps. ``detach=False`` keeps the autograd graph of the weights.
    """
    recorder = _Recorder(model, detach=detach)
    if not recorder.names:
        raise ValueError(f"{type(model).__name__} has no taps: it does not group its patches")
    token = _recorders.set((*_recorders.get(), recorder))
    try:
        with _uncompiled():
            yield recorder.groupings
    finally:
        _recorders.reset(token)


_stance_lock = threading.Lock()
_stance_users = 0
_stance_guard = contextlib.ExitStack()


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled models eagerly. The setting is global, so the last of concurrent users restores it."""
    global _stance_users
    with _stance_lock:
        if _stance_users == 0:
            _stance_guard.enter_context(torch.compiler.set_stance("force_eager"))
        _stance_users += 1
    try:
        yield
    finally:
        with _stance_lock:
            _stance_users -= 1
            if _stance_users == 0:
                _stance_guard.close()
