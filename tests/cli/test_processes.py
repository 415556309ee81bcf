"""``vtok`` as a process: main paths, common mistakes, signals and pipes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .processes import ENVIRONMENT, VTOK, finish, start

Vtok = Callable[..., tuple[int, str, str]]


def test_train_and_eval_as_processes(data: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--model", "paca_vit_nano", "--data", data, "--batch", "32", "--epochs", "2", "--out", out]
    module = (sys.executable, "-m", "visualtokens.train")
    code, text, log = finish(start(*options, command=module))
    assert code == 0, log
    assert "epoch 2/2: loss" in log
    assert "it/s" not in log, "no progress bar without a terminal"
    accuracy = re.search(r"accuracy (\d+\.\d)% after 2 of 2 epochs", text)
    assert accuracy, text
    assert f"vtok eval --checkpoint {out}" in text

    evaluation = start("eval", "--checkpoint", out, "--data", data, "--json")
    again = start("train", *options)
    code, text, log = finish(evaluation)
    assert code == 0
    assert [line.split()[0] for line in log.splitlines()] == ["model", "task", "data", "device"]
    result = json.loads(text)
    assert f"{result['accuracy']:.1%}" == f"{accuracy[1]}%"
    assert result["images"] == sum(map(sum, result["confusion"])) == 30
    code, text, log = finish(again)
    assert (code, text) == (2, "")
    assert log == f"error: '{out}' already holds a run; give --resume, --overwrite or another --out\n"


def wait_for_epoch(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    while not (line := process.stderr.readline()).startswith("epoch 1/"):
        assert line, "ended before the first epoch"


def test_interrupted_training_leaves_a_usable_checkpoint(vtok: Vtok, data: str, tmp_path: Path) -> None:
    options = ("--model", "paca_vit_nano", "--data", data, "--out", tmp_path / "run", "--batch", "32")
    process = start("train", *options, "--epochs", "10000")
    wait_for_epoch(process)
    process.send_signal(signal.SIGINT)
    status, text, log = finish(process)
    assert status == 130
    assert "Traceback" not in log
    assert re.search(r"interrupted at step \d+; resume with: vtok train … --resume auto", log)
    status, text, _ = vtok("eval", "--checkpoint", tmp_path / "run", "--data", data)
    assert status == 0
    assert text.startswith("accuracy ")
    done = len((tmp_path / "run" / "log.jsonl").read_text().splitlines())
    status, _, log = vtok("train", *options, "--epochs", str(done + 1), "--resume", "auto")
    assert status == 0
    first, second = log.splitlines()
    assert first.startswith("resumed after step ")
    assert second.startswith(f"epoch {done + 1}/{done + 1}: ")


def test_second_signal_ends_the_process() -> None:
    code = (
        "import os, signal, time\n"
        "from visualtokens.processes import catch_signals\n"
        "with catch_signals() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('asked', bool(stop), flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = start("-c", code, command=(sys.executable,))
    assert process.stdout is not None
    assert process.stdout.readline() == "asked True\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == -signal.SIGINT


def test_closed_pipe_is_no_error() -> None:
    process = start("models", "nano")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(timeout=300) == 1


def test_full_disk_behind_stdout_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [VTOK, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=300
        )
    assert (done.returncode, done.stderr) == (2, "error: [Errno 28] No space left on device\n")


def test_memory_that_cannot_be_allocated_is_one_line() -> None:
    """The images would take more memory than a process can address."""
    code, out, err = finish(start("bench", "paca_vit_nano", "--batch", "1000000000", "--size", "512"))
    assert (code, out) == (1, "")
    assert err.startswith("error: out of memory (")
    assert err.endswith("; use a smaller batch, image size or model\n")
    assert err.count("\n") == 1


def test_predict_imports_only_what_it_needs(checkpoint: Path, folder: Path) -> None:
    """Of a classifier; torchvision and timm.data come with timm."""
    code = (
        "import sys, vtok; code = vtok.main(); "
        "unused = {'sklearn', 'matplotlib', 'scipy', 'captum', 'torchmetrics', 'faster_coco_eval'}; "
        "unused |= {f'visualtokens.{p}' for p in ('explain', 'bench', 'tune', 'surgery')}; "
        "unused |= {f'visualtokens.{p}' for p in ('tasks.segment', 'tasks.detect', 'train.run', 'papers')}; "
        "print(code, sorted(unused & set(sys.modules)))"
    )
    given = ("predict", folder / "0.png", "--checkpoint", checkpoint, "--device", "cpu")
    status, out, err = finish(start("-c", code, *given, command=(sys.executable,)))
    assert status == 0, err
    assert out.splitlines()[-1] == "0 []"


def test_help_imports_nothing_heavy() -> None:
    """The list of verbs imports nothing heavy beyond the package itself."""
    code = (
        "import sys, visualtokens; before = set(sys.modules)\n"
        "from visualtokens.cli import main; main(['--help'])\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "heavy = {'torchmetrics', 'jsonargparse', 'sklearn', 'matplotlib', 'tqdm', 'scipy'}\n"
        "print(sorted(new & heavy), file=sys.stderr)"
    )
    process = start("-c", code, command=(sys.executable,))
    status, _, err = finish(process)
    assert (status, err) == (0, "[]\n")
