"""Training processes started by torchrun."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from visualtokens.data import Share
from visualtokens.errors import UserError
from visualtokens.processes import restarts

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """This process among all training processes. Every process must make the same calls in the same order."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, which writes files and prints."""
        return self.rank == 0

    @property
    def share(self) -> Share:
        """The part of every batch that this process loads."""
        return Share(self.rank, self.size)

    def exchange(self, values: Sequence[float]) -> Tensor:
        """Return the values of every process: ``(processes, values)`` in float64, the same in all of them."""
        mine = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return mine[None]
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine)
        return torch.stack(gathered)

    def gather(self, item: T) -> list[T]:
        """Return the items of all processes in the order of their ranks."""
        if self.size == 1:
            return [item]
        items: list[T | None] = [None] * self.size
        dist.all_gather_object(items, item)
        return items  # type: ignore[return-value]

    def wait(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()


def local_device(device: torch.device) -> torch.device:
    """Return the GPU of this process if ``device`` is ``cuda`` without an index."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def join_team(device: torch.device) -> Iterator[Team]:
    """Join the processes that torchrun started; without torchrun it is a team of one.

    GPUs exchange gradients by nccl, everything else uses gloo. An existing process group is used as it is.
    """
    if dist.is_available() and dist.is_initialized():
        yield Team(dist.get_rank(), dist.get_world_size())
        return
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Team()
        return
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"several processes cannot train together on {device.type}; use cuda or cpu")
    _init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield Team(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _init_process_group(backend: str) -> None:
    """Create the process group.

    On a single machine torchrun keeps its store over restarts, where an early process would find the
    addresses of the failed ones. So every restart uses its own key prefix.
    """
    if not restarts() or os.environ.get("GROUP_WORLD_SIZE") != "1":
        dist.init_process_group(backend)
        return
    store, rank, size = next(rendezvous("env://"))
    own = dist.PrefixStore(f"restart_{restarts()}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size)
