"""Asking a classifier for probabilities, and leaving it as it was."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from visualtokens.errors import UserError


def probabilities(model: nn.Module, x: Tensor) -> Tensor:
    """``(B, classes)`` for ``x (B, 3, H, W)``."""
    logits, kind = model(x), type(model).__name__
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise UserError(
            f"{kind} gives {got}; explain a classifier that gives (B, classes), 2 or more classes"
        )
    if not logits.isfinite().all():
        raise UserError(f"{kind} gives values that are not finite; check its weights and the image")
    return logits.float().softmax(1)


def input_like(model: nn.Module) -> Tensor:
    """A tensor of the device and floating type that the model's input must have."""
    tensors = chain(model.parameters(), model.buffers())
    return next((t for t in tensors if t.is_floating_point()), torch.empty(0))


def check_class(count: int, classes: Sequence[str] | None, **numbers: int | None) -> None:
    """That there are as many names as classes, and that each of ``numbers`` is one of them, if given."""
    if classes is not None and len(classes) != count:
        raise UserError(f"{len(classes)} class names for a model of {count} classes; give one for each")
    for name, number in numbers.items():
        if number is not None and not 0 <= number < count:
            raise UserError(f"{name}={number}, but the model has {count} classes; give 0 to {count - 1}")


def check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise UserError(f"{name}={value}; give at least 1")


_modes: dict[nn.Module, tuple[int, list[tuple[nn.Module, bool]]]] = {}  # users now, flags before
_modes_lock = threading.Lock()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards every submodule has its own flag back.

    Threads that explain one model side by side share the switch: the first sets it, the last restores it.
    """
    with _modes_lock:
        users, flags = _modes.get(model) or (0, [(m, m.training) for m in model.modules()])
        _modes[model] = users + 1, flags
        model.eval()
    try:
        yield
    finally:
        with _modes_lock:
            users, flags = _modes.pop(model)
            if users > 1:
                _modes[model] = users - 1, flags
            else:
                for module, training in flags:
                    module.training = training
