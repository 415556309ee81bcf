"""The processes that train together, as torchrun starts them; one process is a team of one."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from visualtokens.data import Share
from visualtokens.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """Which process this is, and how to talk to the others. Every process must ask the same, in turn."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and talks to people."""
        return self.rank == 0

    @property
    def share(self) -> Share:
        """This process's part of every batch."""
        return Share(self.rank, self.size)

    def exchange(self, values: Sequence[float]) -> Tensor:
        """What every process tells: ``(processes, values)`` in float64, the same in all of them."""
        mine = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return mine[None]
        told = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(told, mine)
        return torch.stack(told)

    def gather(self, item: T) -> list[T]:
        """The item of every process, in order."""
        if self.size == 1:
            return [item]
        items: list[T | None] = [None] * self.size
        dist.all_gather_object(items, item)
        return items  # type: ignore[return-value]

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            dist.barrier()


def is_first() -> bool:
    """Whether this is the process that will lead, for those who speak before the team has met."""
    return int(os.environ.get("RANK", "0")) == 0


def restarts() -> int:
    """How often torchrun has started this job again after one of its processes failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def local_device(device: torch.device) -> torch.device:
    """The GPU of this process, if ``device`` names none: torchrun counts the processes of each machine."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def join_team(device: torch.device) -> Iterator[Team]:
    """Meet the other processes that torchrun has started; alone, there is nobody to wait for.

    Gradients travel by nccl between GPUs, everything else by gloo. A process group that the caller has
    made is used as it is.
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
    _meet("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield Team(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _meet(backend: str) -> None:
    """Make the process group.

    On a single machine torchrun keeps its store when it starts the processes again, and a process that is
    early would find the addresses of those that failed there. So every start has names of its own.
    """
    if not restarts() or os.environ.get("GROUP_WORLD_SIZE") != "1":
        dist.init_process_group(backend)
        return
    store, rank, size = next(rendezvous("env://"))
    fresh = dist.PrefixStore(f"restart_{restarts()}", store)
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=size)


# Choosing where to compute.


def pick_device(name: str) -> torch.device:
    """The device called ``name``; ``"auto"`` is the accelerator of this machine, or its CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"unknown device {name!r}; choose auto, cpu, cuda, cuda:1 or mps") from error
    if device.type == "cpu":
        return device
    if accelerator is None or accelerator.type != device.type:
        has = "no accelerator" if accelerator is None else f"only {accelerator.type}"
        raise UserError(f"device {name!r} is not available: this machine has {has}; use auto or cpu")
    if device.index is not None and device.index >= torch.accelerator.device_count():
        count = torch.accelerator.device_count()
        raise UserError(f"device {name!r} does not exist: the last one is {device.type}:{count - 1}")
    return device


# Stopping a run from outside: the first signal asks, the second one ends the process.

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """Raised between two batches of an evaluation once a stop was asked for."""


class Stop:
    """Whether somebody asked this process to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def request(self, number: int, frame: FrameType | None = None) -> None:
        """The signal handler. Gives the signals back to the system, so that the next one ends at once."""
        self.signal = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    def agree(self, signals: Iterable[float]) -> bool:
        """Stop if one of the processes that train together was asked to; 0 stands for one that was not."""
        asked = int(max(signals))
        if asked and self.signal is None:
            self.signal = asked
        return bool(self)


@contextlib.contextmanager
def catch_signals() -> Iterator[Stop]:
    """Turn SIGINT and SIGTERM into a request inside the block; the old handlers come back after it.

    Only the main thread may set handlers; in another one the block never sees a request.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {each: signal.signal(each, stop.request) for each in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
