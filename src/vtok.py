"""The command ``vtok``: sets up the threads of this process, then runs :mod:`visualtokens.cli`.

This is a module beside the package because OpenMP reads its settings when torch is loaded, which
``import visualtokens`` does. ``python -m vtok`` and ``python -m visualtokens`` are the same command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path

# A thread that waits for the others spins this often before it sleeps. By default libgomp spins for
# milliseconds, which takes the processor from the threads that are waited for when other processes compute;
# see benchmarks/busy.py.
SPIN_COUNT = 2_000
running = False  # whether this process is the command; `visualtokens` then imports only what a verb needs
MOUNT = Path("/sys/fs/cgroup")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``vtok`` with these arguments, by default those of the process; return the exit code."""
    global running
    configure_threads(os.environ)
    running = True
    sys.modules.setdefault("vtok", sys.modules[__name__])  # also as `python -m vtok`
    from visualtokens.cli import main

    return main(arguments)


def configure_threads(environment: MutableMapping[str, str]) -> None:
    """Limit OpenMP's spinning, and its threads to the CPU quota of this container.

    Variables that are set already are left as they are. OpenMP itself respects the CPU affinity.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    quota = cpu_quota()
    if quota is not None and quota < cpu_count():
        environment.setdefault("OMP_NUM_THREADS", str(max(1, round(quota))))


def cpu_count() -> int:
    """The number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(membership: Path = Path("/proc/self/cgroup"), mount: Path = MOUNT) -> float | None:
    """The processors' worth of time that the control groups of this process allow; None without a limit.

    The lowest limit of the group and its ancestors, in version 1 or 2 of control groups.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return None
    quotas = [quota for line in lines for quota in _quotas(line, mount)]
    return min(quotas, default=None)


def _quotas(line: str, mount: Path) -> Iterator[float]:
    """The limits of one hierarchy, a line ``number:controllers:path`` of the membership."""
    _, controllers, path = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return
    root = mount / "cpu" if controllers else mount
    folder = root / path.strip("/")
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
    for group in (folder, *folder.parents):
        values = _read(*(group / name for name in names))
        if len(values) == 2 and all(value.isdigit() for value in values):  # "max" or -1 is no limit
            yield int(values[0]) / int(values[1])
        if group == root:
            return


def _read(*files: Path) -> list[str]:
    try:
        return " ".join(file.read_text() for file in files).split()
    except OSError:  # the root group has no limit, and a container may not see its own path
        return []


if __name__ == "__main__":
    sys.exit(main())
