"""Run the numerical tests under the code paths that the libraries take on other processors.

    python -m tests.cpu_matrix                  every combination, then a table
    python -m tests.cpu_matrix avx2 threads-3   some of them
    python -m tests.cpu_matrix --list           their names

PyTorch, oneDNN and MKL choose kernels by what the processor can do, and kernels round differently. Each of
the three can be told to use older instructions, so one machine can stand in for many.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

OLDEST = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}

# The environment of each combination; .github/workflows/test.yml names the same ones.
COMBINATIONS: dict[str, dict[str, str]] = {
    "native": {},
    "threads-2": {"OMP_NUM_THREADS": "2"},
    "threads-3": {"OMP_NUM_THREADS": "3"},
    "aten-default": {"ATEN_CPU_CAPABILITY": "default"},
    "aten-avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "onednn-sse41": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "onednn-avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "mkl-compatible": {"MKL_CBWR": "COMPATIBLE"},
    "mkl-avx2": {"MKL_CBWR": "AVX2"},
    "oldest": OLDEST,
    "oldest-threads-3": OLDEST | {"OMP_NUM_THREADS": "3"},
    "avx2": AVX2,
    "avx2-threads-2": AVX2 | {"OMP_NUM_THREADS": "2"},
}
NUMERICAL = ("ops", "layers", "models", "reduce", "explain", "tasks")  # folders of tests/


def environment(name: str) -> dict[str, str]:
    """The environment variables of a combination, on top of this process's own."""
    # Several processes share the cores: threads that wait must not spin.
    defaults = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return os.environ | defaults | COMBINATIONS[name]


def run(name: str, arguments: list[str]) -> tuple[int, str]:
    """Exit code of pytest and its closing line, under one combination."""
    folders = [str(Path(__file__).parent / folder) for folder in NUMERICAL]
    command = [sys.executable, "-m", "pytest", "-m", "not slow", "--durations=0", *folders, *arguments]
    done = subprocess.run(command, env=environment(name), text=True, capture_output=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            print(f"  {line}", flush=True)
    closing = [line for line in done.stdout.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return done.returncode, closing[-1].strip("= ") if closing else done.stderr.strip()[-300:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help="combinations to run; by default all")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options, pytest_arguments = parser.parse_known_args()
    if options.list:
        print("\n".join(COMBINATIONS))
        return 0
    unknown = sorted(set(options.names) - set(COMBINATIONS))
    if unknown:
        parser.error(f"unknown combination {', '.join(unknown)}; choose from {', '.join(COMBINATIONS)}")
    worst, rows = 0, []
    for name in options.names or COMBINATIONS:
        began = time.monotonic()
        print(f"{name}: {COMBINATIONS[name]}", flush=True)
        code, closing = run(name, pytest_arguments)
        worst = worst or code
        rows.append(f"{name:18} {closing}")
        print(f"  {closing} ({time.monotonic() - began:.0f} s in all)", flush=True)
    print("\n".join(["", *rows]))
    return worst


if __name__ == "__main__":
    sys.exit(main())
