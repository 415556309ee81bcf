"""What a measurement was made on, so that a saved result says it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")


def machine() -> dict[str, str | int | float | None]:
    """The processor, the memory and the versions that a measurement depends on. JSON-ready."""
    return {
        "cpu": _field(CPUINFO, "model name") or platform.processor() or platform.machine(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "memory_gb": _memory_gb(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cores() -> int:
    """The cores this process may use, which in a container is less than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gb() -> float | None:
    """The machine's memory in GB (10⁹ bytes), None where the system does not tell."""
    kilobytes = _field(MEMINFO, "MemTotal")
    return None if kilobytes is None else round(int(kilobytes.split()[0]) * 1024 / 1e9, 1)


def _field(path: Path, name: str) -> str | None:
    """The value of the first line ``name : value``; None where the file or the line does not exist."""
    if not path.is_file():
        return None
    for line in path.read_text().splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return None
