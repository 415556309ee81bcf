"""Several real processes that train together, without the seconds that each takes to import torch."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

# The server is a clean process that has imported everything; each rank is forked from it.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["visualtokens.train", "torchmetrics.classification", "tests.train.helpers"])
TIMEOUT = 240


def run_ranks(function: Callable[..., Any], *arguments: Any, size: int = 2) -> list[Any]:
    """What ``function(*arguments)`` gives in each of ``size`` processes, or the error it raises there."""
    port = free_port()
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "MASTER_PORT": str(port),
        }
        process = CONTEXT.Process(target=_rank, args=(theirs, place, function, arguments))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [_receive(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(TIMEOUT):
        raise TimeoutError("a rank gave no answer")
    kind, value = pickle.loads(pipe.recv_bytes())
    if kind == "bug":
        raise RuntimeError(value)
    return value


def _rank(pipe: Connection, place: dict[str, str], function: Callable[..., Any], arguments: tuple) -> None:
    os.environ.update(place, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    try:
        answer = ("value", function(*arguments))
    except ValueError as error:  # UserError is one
        answer = ("value", error)
    except Exception:  # noqa: BLE001 - whatever it is, the test must see it
        answer = ("bug", traceback.format_exc())
    # Not `send`, which would hand over tensors in shared memory that ends with this process.
    pipe.send_bytes(pickle.dumps(answer))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
