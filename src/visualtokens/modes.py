"""Evaluation mode for the length of a block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch import nn

_lock = threading.Lock()
# Of each model in use: how many blocks are entered, and the flags before the first.
_active: dict[nn.Module, tuple[int, list[tuple[nn.Module, bool]]]] = {}


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode; afterwards restore the ``training`` flag of every submodule.

    Blocks may be nested, and threads may use one model at the same time: the first block to enter saves the
    flags, the last to leave restores them.
    """
    with _lock:
        users, flags = _active.get(model) or (0, [(module, module.training) for module in model.modules()])
        _active[model] = users + 1, flags
        model.eval()
    try:
        yield
    finally:
        with _lock:
            users, flags = _active.pop(model)
            if users > 1:
                _active[model] = users - 1, flags
            else:
                for module, training in flags:
                    module.training = training
