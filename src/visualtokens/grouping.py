"""The one currency of the library: which patches belong to which token, and how to get hold of it.

Every step that assigns patches to tokens passes its result through a :class:`Tap`. Usually nobody
listens and the tap costs nothing. Inside :func:`record_groupings` the groupings of one model are
collected, by the name of their tap, without leaving anything on the modules.
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
    """Which of N patches belong to which of K tokens.

    Dense form: ``weights (B, N, K)``. Sparse form: ``weights (B, N, J)`` with ``index (B, N, J)``
    naming the token of each weight; J = 1 is a hard assignment, J = 9 are STViT's neighbours; an index
    of -1 is nobody.
    Read it through :meth:`dense`, :meth:`maps` and :meth:`hard`, which work on both.
    """

    weights: Tensor  # (B, N, K), or (B, N, J) beside an index
    grid: tuple[int, int]  # (H, W) with H·W = N
    size: Tensor  # (B, K): how many patches each token stands for
    index: Tensor | None = None  # (B, N, J)

    @classmethod
    def soft(cls, weights: Tensor, grid: tuple[int, int]) -> Grouping:
        """From dense weights; a token's size is the effective number of its patches, (Σw)² / Σw².

        For equal weights on s patches that is exactly s, so soft and hard groupings compare.
        """
        with torch.no_grad():  # a count: gradient checkpointing must not see it save anything
            w = weights.float()
            size = w.sum(1).square() / w.square().sum(1).clamp_min(torch.finfo(torch.float32).tiny)  # (B, K)
        return cls(weights, grid, size)

    @classmethod
    def hard_from(cls, assignment: Tensor, tokens: int, grid: tuple[int, int]) -> Grouping:
        """From ``assignment (B, N)`` of token numbers; -1 marks a patch that no token stands for."""
        present = (assignment >= 0).to(torch.float32)  # (B, N)
        size = present.new_zeros(assignment.shape[0], max(tokens, 1))
        size = size.scatter_add(1, assignment.clamp_min(0), present)[:, :tokens]  # (B, K)
        return cls(present.unsqueeze(-1), grid, size, assignment.unsqueeze(-1))

    @property
    def tokens(self) -> int:
        """K."""
        return self.size.shape[1]

    def dense(self) -> Tensor:
        """``(B, N, K)`` weights, made on demand for the sparse form."""
        if self.index is None:
            return self.weights
        b, n, _ = self.weights.shape
        out = self.weights.new_zeros(b, n, self.tokens + 1)  # the last column takes the index -1
        index = torch.where(self.index < 0, self.tokens, self.index)
        return out.scatter_add(2, index, self.weights)[:, :, : self.tokens]

    def maps(self) -> Tensor:
        """``(B, K, H, W)``: one map per token."""
        return self.dense().mT.unflatten(2, self.grid)

    def hard(self) -> Tensor:
        """``(B, N)``: the token that holds most of each patch (lowest number on ties), -1 for none."""
        if self.index is None:
            if self.tokens == 0:
                return self.weights.new_full(self.weights.shape[:2], -1, dtype=torch.long)
            strongest, token = self.weights.max(2)
            return torch.where(strongest > 0, token, -1)
        best = self.weights.argmax(2, keepdim=True)  # (B, N, 1)
        token = self.index.gather(2, best).squeeze(2)
        return torch.where(self.weights.amax(2) > 0, token, -1)


class Tap(nn.Module):
    """A place in a model where a grouping can be read. Passes its weights through unchanged.

    No parameters, no state: under ``torch.compile`` it disappears from the graph.
    """

    def forward(
        self, weights: Tensor, grid: tuple[int, int], size: Tensor | None = None, index: Tensor | None = None
    ) -> Tensor:
        if self.wanted():
            if size is None and index is not None:
                raise ValueError("a sparse grouping must say how many tokens there are: give its size (B, K)")
            grouping = Grouping.soft(weights, grid) if size is None else Grouping(weights, grid, size, index)
            for recorder in _recorders.get():
                recorder.add(self, grouping)
        return weights

    def wanted(self) -> bool:
        """Whether somebody records this tap now, so that what is costly to make is made only then."""
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


# A context variable belongs to one thread, so two threads record the same model side by side.
_recorders: ContextVar[tuple[_Recorder, ...]] = ContextVar("visualtokens_recorders", default=())


def _in_backward() -> bool:
    """Gradient checkpointing runs the forward pass again during backward; that is not a new grouping."""
    return torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def record_groupings(model: nn.Module, *, detach: bool = True) -> Iterator[dict[str, Grouping]]:
    """Collect the groupings of the forward passes made inside the block.

    >>> with record_groupings(model) as groupings:
    ...     model(images)
    >>> groupings["stages.0.blocks.0.attn.clusters.tap"].maps()   # (B, K, H, W)

    The names are those of the model's taps, in the order they were reached; another pass overwrites.
    Records the calling thread only. A compiled model runs uncompiled inside the block, because a
    compiled graph has no taps. ``detach=False`` keeps the autograd graph of the weights.
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
    """Run compiled models eagerly. The switch is one for the process, so the last user turns it back."""
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
