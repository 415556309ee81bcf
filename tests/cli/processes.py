"""``vtok`` as a process, and limits of the operating system."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

VTOK = str(Path(sys.executable).with_name("vtok"))
# Python buffers stdout unless it is told otherwise.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "90", "PYTHONUNBUFFERED": ""}


def start(
    *arguments: str | Path, command: Sequence[str] = (VTOK,), variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT | dict(variables or {}),
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@contextlib.contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """Writing more bytes to a file fails inside the block, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
