"""Peak memory of a call, and the machine that a measurement ran on."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from visualtokens.errors import UserError


def peak_memory(run: Callable[[], object], *, device: torch.device | str = "cpu") -> int:
    """Maximum of the bytes allocated during ``run()``, without those allocated before.

    Existing weights and inputs do not count. Activations, outputs, gradients and temporaries inside
    operations (a convolution's reordered input, an attention kernel's buffers) do.

    CPU: replays the allocations and releases of torch's allocator on the calling thread and its autograd
    thread. Memory that bypasses torch (MKL's packing buffers, NumPy) and the allocator's overhead are not
    included. Call ``run()`` once before, to exclude one-time allocations. CUDA: the peak of the caching
    allocator.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return _peak_on_cuda(run, device)
    if device.type != "cpu":
        raise UserError(f"cannot measure memory on device {device}; choose cpu or cuda")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with _without_profiler_log():
            profiler.start()
        try:
            run()
        finally:
            with _without_profiler_log():
                profiler.stop()
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [(e["ts"], e["args"]) for e in events if e.get("name") == "[memory]"]
    changes.sort(key=lambda change: change[0])
    return replay([(args["Addr"], args["Bytes"]) for _, args in changes if args["Device Type"] == 0])


def replay(changes: list[tuple[int, int]]) -> int:
    """Peak of the allocated bytes after ``(address, bytes)`` changes; a release has negative bytes.

    Releases of memory that was allocated before the first change are ignored.
    """
    alive: dict[int, int] = {}
    total = peak = 0
    for address, size in changes:
        if size > 0:
            alive[address] = size
            total += size
            peak = max(peak, total)
        else:
            total -= alive.pop(address, 0)
    return peak


def _peak_on_cuda(run: Callable[[], object], device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


PROFILER_LOG = re.compile(rb"[A-Z]+:\d{4}-\d\d-\d\d .*\.cpp:\d+\]")


@contextlib.contextmanager
def _without_profiler_log() -> Iterator[None]:
    """Drop the lines that the profiler's C++ code writes to the process's stderr; pass all others on.

    The profiler bypasses ``sys.stderr`` and has no option for it.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        stream = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stream, 2)
            held.seek(0)
            for line in held:
                if not PROFILER_LOG.match(line):
                    os.write(stream, line)
            os.close(stream)


CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")


def machine() -> dict[str, str | int | float | None]:
    """Processor, memory and library versions that a measurement depends on, ready for JSON."""
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
    """Number of cores that this process may use; in a container fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gb() -> float | None:
    """Memory in GB (10⁹ bytes), None if the system does not report it."""
    kilobytes = _field(MEMINFO, "MemTotal")
    return None if kilobytes is None else round(int(kilobytes.split()[0]) * 1024 / 1e9, 1)


def _field(path: Path, name: str) -> str | None:
    """Value of the first line ``name : value``; None if the file or the line does not exist."""
    if not path.is_file():
        return None
    for line in path.read_text().splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return None
