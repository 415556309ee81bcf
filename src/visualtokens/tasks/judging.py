"""What every evaluation does besides judging."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn


def of_all_processes(total: Tensor) -> Tensor:
    """The sum over the processes that train together, if there are several."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    return total


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards every submodule has its own flag back."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
