"""Run the numerical tests with the kernels that the libraries choose on other processors.

    python -m tests.cpu_matrix                  all combinations, then a table
    python -m tests.cpu_matrix avx2 threads-3   some combinations
    python -m tests.cpu_matrix --list           print the names of the combinations
    python -m tests.cpu_matrix avx2 -- -x       pass the arguments after -- to pytest

PyTorch, oneDNN and MKL choose kernels by the instruction set of the processor, and kernels round differently.
Each of the three can be restricted to older instruction sets, so that one machine can imitate others.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OLDEST = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}

# Environment variables of each combination; .github/workflows/test.yml lists the same names.
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
    """The environment of this process with the variables of a combination."""
    # Waiting threads must not spin: other processes share the cores.
    defaults = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return os.environ | defaults | COMBINATIONS[name]


def run(name: str, arguments: list[str]) -> tuple[int, str]:
    """Exit code and summary line of pytest, for one combination."""
    # Kernels that torch.compile made for another combination must not be reused.
    with tempfile.TemporaryDirectory() as cache:
        return _run(name, arguments, environment(name) | {"TORCHINDUCTOR_CACHE_DIR": cache})


def _run(name: str, arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
    folders = [str(Path(__file__).parent / folder) for folder in NUMERICAL]
    command = [sys.executable, "-m", "pytest", "-m", "not slow", "--durations=0", *folders, *arguments]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            print(f"  {line}", flush=True)
    summary = [line for line in done.stdout.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return done.returncode, summary[-1].strip("= ") if summary else done.stderr.strip()[-300:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help="combinations to run (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names and exit")
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, pytest_arguments = parser.parse_args(arguments[:split]), arguments[split + 1 :]
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
        code, summary = run(name, pytest_arguments)
        worst = worst or code
        rows.append(f"{name:18} {summary}")
        print(f"  {summary} ({time.monotonic() - began:.0f} s with startup)", flush=True)
    print("\n".join(["", *rows]))
    return worst


if __name__ == "__main__":
    sys.exit(main())
