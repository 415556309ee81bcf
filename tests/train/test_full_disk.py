"""Full and read-only disks: a clear error, and the last checkpoint stays intact."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.train.helpers import Make, at_step, last_state, same, weights
from visualtokens.train import CannotSave, TrainConfig, load_checkpoint, train

Mount = Callable[[str], Path]


def call(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a file system in memory of the given size."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = False

    def make(options: str) -> Path:
        nonlocal mounted
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.name != "posix" or os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("only root can mount, where that is allowed")
        mounted = True
        return folder

    yield make
    if mounted:
        call("umount", "--lazy", folder)


def check_resume(settings: TrainConfig, resumed: TrainConfig, steps: int) -> None:
    state, saved = last_state(settings)
    assert state.step == steps
    assert same(weights(settings), saved)
    assert load_checkpoint(settings.out).classes
    assert not list(Path(settings.out).rglob(".*.tmp")), "no partial files are left"
    train(resumed)
    assert last_state(resumed)[0].step == 6


def test_a_disk_that_is_full(config: Make, mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one snapshot of about 7 MB and for less than half of the next."""
    folder = mount("size=60m")
    settings = config(out=str(folder / "run"), save_every=1, keep=1)
    ballast = folder / "ballast"
    at_step(monkeypatch, 2, lambda: ballast.write_bytes(bytes(shutil.disk_usage(folder).free - 3_000_000)))
    with pytest.raises(
        CannotSave, match=r"MB free\): .*; the snapshot epoch_0000_step_00000002 is intact"
    ) as caught:
        train(settings)
    assert "\n" not in str(caught.value)
    ballast.unlink()
    monkeypatch.undo()
    check_resume(settings, config(out=settings.out, save_every=1, resume="auto"), steps=2)


def test_a_folder_that_becomes_read_only(config: Make, mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(out=str(mount("size=1m,ro").parent / "run"), save_every=1)
    snapshots, read_only = Path(settings.out) / "snapshots", Path(settings.out).parent / "disk"
    at_step(monkeypatch, 1, lambda: call("mount", "--bind", read_only, snapshots))
    message = r"[Rr]ead-only file system.*; the snapshot epoch_0000_step_00000001 is intact"
    with pytest.raises(CannotSave, match=message):
        train(settings)
    call("umount", snapshots)
    monkeypatch.undo()
    check_resume(settings, config(out=settings.out, save_every=1, resume="auto"), steps=1)


def test_a_limit_on_the_size_of_files(config: Make) -> None:
    """As a process that may not write more than a little, which needs no disk of its own."""
    settings = config(epochs=1)
    train(settings)
    before = weights(settings)
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n"
        "from visualtokens.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    options = ["--model", settings.model, "--data", settings.data, "--augment", "digits", "--device", "cpu"]
    options += ["--batch", "32", "--epochs", "2", "--out", settings.out, "--resume"]
    command = [sys.executable, "-c", code, "train", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: cannot save in '{settings.out}'")
    assert (
        "the snapshot epoch_0001_step_00000003 is intact; free some space, then resume with --resume auto"
        in last
    )
    assert "Traceback" not in done.stderr
    assert same(weights(settings), before)
    assert last_state(settings)[0].step == 3


def test_a_folder_that_cannot_be_made(config: Make, mount: Mount) -> None:
    folder = mount("size=1m,ro")
    with pytest.raises(CannotSave, match=r"cannot save in .*[Rr]ead-only file system.*; nothing was changed"):
        train(config(out=str(folder / "run")))
