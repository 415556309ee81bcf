"""One run at a time in an output folder."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.helpers import Make, lines
from visualtokens.errors import UserError
from visualtokens.train import TrainConfig, train

fcntl = pytest.importorskip("fcntl", reason="this system has no locks")


def start(settings: TrainConfig) -> subprocess.Popen[str]:
    """Start this run as a process, with one worker; return when it has logged a step."""
    command = [sys.executable, "-m", "visualtokens.train", "--model", settings.model, "--data", settings.data]
    command += ["--out", settings.out, "--augment", "digits", "--device", "cpu", "--batch", "32"]
    command += ["--epochs", "10000", "--workers", "1", "--log_every", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 200
    while not (log := Path(settings.out) / "steps.jsonl").exists() or not log.stat().st_size:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"no step: {process.communicate()[1]}")
        time.sleep(0.02)
    return process


def stop_worker(run: int) -> int:
    """Stop the data loading worker of a run, which would end itself a few seconds after the run."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # each epoch has a new one
        for child in Path(f"/proc/{run}/task/{run}/children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGSTOP)
                return int(child)
    raise AssertionError("no worker")


@pytest.mark.skipif(sys.platform != "linux", reason="finds the worker in /proc")
def test_second_run_is_refused_until_the_first_one_is_killed(config: Make) -> None:
    """Also while a data loading worker of the killed run is still alive."""
    settings = config(epochs=10_000)
    process = start(settings)
    try:
        for options in ({}, {"resume": "auto"}, {"overwrite": True}):
            with pytest.raises(UserError) as caught:
                train(config(epochs=10_000, **options))
            message = str(caught.value)
            assert f"in use by process {process.pid} on {socket.gethostname()} since 20" in message
            assert f"--out {settings.out}" in message
            assert "\n" not in message
        worker = stop_worker(process.pid)
    finally:
        process.kill()
        process.wait()
    try:
        done = lines(settings, "steps.jsonl")[-1]["epoch"]
        train(config(epochs=done, resume="auto"))
    finally:
        os.kill(worker, signal.SIGKILL)  # raises if it has ended
    steps = [record["step"] for record in lines(settings, "steps.jsonl")]
    assert steps == sorted(set(steps))


def test_lock_excludes_other_threads_and_leaves_no_file(tmp_path: Path) -> None:
    from visualtokens.train.lock import lock

    for _ in range(2):
        with lock(tmp_path):
            for _ in range(2):
                with pytest.raises(UserError, match=f"in use by process {os.getpid()} on "), lock(tmp_path):
                    raise AssertionError("locked twice")
        assert list(tmp_path.iterdir()) == []


def test_forked_process_does_not_hold_the_lock(tmp_path: Path) -> None:
    from visualtokens.train.lock import lock

    with lock(tmp_path):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
    try:
        with lock(tmp_path):
            pass
    finally:
        child.kill()
        child.join()


def test_lock_file_of_a_killed_process_is_not_in_the_way(tmp_path: Path) -> None:
    from visualtokens.train.lock import LOCK, lock

    (tmp_path / LOCK).write_text('{"host": "gone", "pid": 17')
    with lock(tmp_path):
        with pytest.raises(UserError, match=f"in use by process {os.getpid()} "), lock(tmp_path):
            pass
        (tmp_path / LOCK).write_text("")
        with pytest.raises(UserError, match="in use by another run; "), lock(tmp_path):
            pass


def test_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from visualtokens.train.lock import lock

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock(tmp_path):
        assert "No locks available" in caplog.text
        assert "start no second run in it" in caplog.text
