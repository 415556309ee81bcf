"""How much memory a pass needs above what was there before it."""

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
    """The most bytes alive at once during ``run()``, beyond those alive before it.

    Weights and inputs that exist before do not count; activations, outputs, gradients and the
    temporaries inside operations do (a convolution's reordered input, an attention kernel's buffers).

    CPU: every allocation and release of torch's allocator on the calling thread and its autograd, played
    back in order. Not seen: what a library takes from the system behind torch's back (MKL's packing
    buffers, NumPy) and the slack of the allocator. Run once before, so that what is made only the first
    time is not counted. CUDA: the peak of the caching allocator.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return _peak_on_cuda(run, device)
    if device.type != "cpu":
        raise UserError(f"cannot measure memory on device {device}; choose cpu or cuda")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with _without_chatter():
            profiler.start()
        try:
            run()
        finally:
            with _without_chatter():
                profiler.stop()
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [(e["ts"], e["args"]) for e in events if e.get("name") == "[memory]"]
    changes.sort(key=lambda change: change[0])
    return replay([(args["Addr"], args["Bytes"]) for _, args in changes if args["Device Type"] == 0])


def replay(changes: list[tuple[int, int]]) -> int:
    """The peak of live bytes of ``(address, bytes)`` changes, negative bytes being a release.

    Releases of what was allocated before the first change are somebody else's, and ignored.
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


CHATTER = re.compile(rb"[A-Z]+:\d{4}-\d\d-\d\d .*\.cpp:\d+\]")


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
    """Hold back the lines that the profiler's native half writes to the error stream of the process.

    It writes past ``sys.stderr`` and knows no switch. Lines of anybody else are passed on.
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
                if not CHATTER.match(line):
                    os.write(stream, line)
            os.close(stream)


# What a measurement was made on, so that a saved result says it.

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
