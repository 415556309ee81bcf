"""Signals that reach a whole job leave the workers to the process that trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os, signal, subprocess, sys
import torch
from visualtokens.data import Preprocess, create_loader, open_dataset

torch.set_num_threads(1)
if sys.argv[1] == "ask":
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: None)
look = Preprocess((16, 16), (0.5,) * 3, (0.5,) * 3)
loader = create_loader(open_dataset("digits", "val"), look, batch=40, train=False, workers=2)
seen = 0
for number, batch in enumerate(loader):
    seen += len(batch)
    if number == 2:
        workers = [worker.pid for worker in loader._batches._iterator._workers]
        if sys.argv[1] == "ask":
            for name in ("INT", "TERM"):  # by another process, as a terminal and a scheduler do
                subprocess.run(["kill", f"-{name}", "--", f"-{os.getpgid(0)}"])
        else:
            print(*workers, flush=True)
            raise RuntimeError("a crash")
print(seen)
"""


def run(how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CODE, how], capture_output=True, text=True, timeout=120, start_new_session=True
    )


def test_workers_go_on_when_the_whole_job_is_signalled() -> None:
    done = run("ask")
    assert (done.returncode, done.stdout) == (0, "360\n"), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_workers_end_with_a_process_that_crashes() -> None:
    done = run("crash")
    assert done.returncode == 1
    assert "RuntimeError: a crash" in done.stderr
    assert not [pid for pid in done.stdout.split() if Path(f"/proc/{pid}").exists()]
