"""The lock of an output folder. The kernel releases it when its holder ends, also by SIGKILL."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from visualtokens.errors import UserError
from visualtokens.files import saving

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK = ".vtok-lock"
_held: set[int] = set()  # descriptors of the locks of this process


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the lock of the folder inside the block; a :class:`UserError` names another holder.

    Where locks are not supported, a warning says so.
    """
    descriptor = _acquire(folder)
    try:
        with saving(folder, "nothing was changed"):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(_this_process()).encode())
        yield
    finally:
        if descriptor in _held:  # not in a forked process
            with contextlib.suppress(OSError):  # a lock file that stays is not locked
                if _is_file(descriptor, folder / LOCK):
                    (folder / LOCK).unlink()
            _close(descriptor)


def _acquire(folder: Path) -> int:
    path = folder / LOCK
    while True:
        with saving(folder, "nothing was changed"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # closed on exec, as all in Python
        _held.add(descriptor)
        try:
            _lock(descriptor, folder)
        except BlockingIOError as error:
            holder = _holder(path)
            _close(descriptor)
            raise UserError(
                f"{str(folder)!r} is in use by {holder}; wait until it ends, stop it, or give another --out"
            ) from error
        if _is_file(descriptor, path):
            return descriptor
        _close(descriptor)  # the last holder has just deleted the file


def _lock(descriptor: int, folder: Path) -> None:
    # A lock of flock belongs to the open file: unlike one of lockf, it also excludes other threads, and it
    # stays when the process reads the file.
    try:
        if fcntl is None:
            raise OSError("this system has no flock")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:  # not supported by this system or file system
        logger.warning("cannot lock %s (%s); start no second run in it", folder, error)


def _close(descriptor: int) -> None:
    _held.discard(descriptor)
    os.close(descriptor)


def _close_all() -> None:
    """Close the copies of a forked process, such as a data loading worker, which may outlive the holder."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _this_process() -> dict[str, str | int]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": " ".join(shlex.join(sys.argv).split())[:400],
    }


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return "process {pid} on {host} since {started} ({command})".format(**holder)
    except (OSError, ValueError, KeyError, TypeError):  # it has not written its name yet
        return "another run"
