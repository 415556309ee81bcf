"""What the verbs say on stderr: a header and progress, as a bar on a terminal and as lines elsewhere."""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import termios
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from visualtokens import progress
from visualtokens.bench import interleave
from visualtokens.cli.train import _text
from visualtokens.train import TrainConfig, TrainResult
from visualtokens.tune import planning

from .processes import ENVIRONMENT, VTOK

Vtok = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def known_hardware(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four processors, of which one is used; a line for every step."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


DEVICE = "cpu, 4 cores, 1 thread, 1 process"
NUMBER = r"[\d.]+(?:e-\d+)?"


def matches(lines: list[str], patterns: list[str]) -> None:
    """Assert that each line matches its pattern, in which # is a number."""
    assert len(lines) == len(patterns), lines
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(re.escape(pattern).replace(r"\#", NUMBER), line), line


def test_training(vtok_with_progress: Vtok, data: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = ("--model", "paca_vit_nano", "--data", data, "--out", out, "--batch", "32", "--epochs", "2")
    code, text, err = vtok_with_progress("train", *given, "--device", "cpu", "--seed", "3")
    assert code == 0
    steps = [
        "epoch #/2: 1 of 2 steps, # images/s, loss #, accuracy #%, lr #, # s left",
        "epoch #/2: 2 of 2 steps, # images/s, loss #, accuracy #%, lr #, 0 s left",
        "evaluate: 1 of 1 batch, # images/s, 0 s left",
        "epoch #/2: loss #, train accuracy #%, val accuracy #%, # images/s",
    ]
    lines = err.splitlines()
    assert lines[:6] == [
        "model   paca_vit_nano, 0.59 M parameters, input 32×32",
        "task    classify, 10 classes",
        f"data    {data}, 64 training and 30 validation images",
        f"device  {DEVICE}",
        "seed    3",
        f"output  {out}",
    ]
    first = [step.replace("s left", "s left (# s in all)") for step in steps[:2]]
    matches(lines[6:], [*first, *steps[2:], *steps])
    trained, *_, saved, try_eval, try_predict = text.splitlines()
    spent = "# s, # images/s, #% of the time waiting for images"
    matches([trained], [f"paca_vit_nano: val accuracy #% after 2 of 2 epochs ({spent})"])
    assert saved == f"saved in {out}"
    assert try_eval == f"try: vtok eval --checkpoint {out} --data {data}"
    assert try_predict == f"try: vtok predict photo.jpg --checkpoint {out}"


def test_a_finished_run_has_no_rate(vtok_with_progress: Vtok, checkpoint: Path, data: str) -> None:
    given = ("--model", "paca_vit_nano", "--data", data, "--batch", "32", "--epochs", "1", "--device", "cpu")
    code, text, err = vtok_with_progress("train", *given, "--out", checkpoint, "--resume")
    assert code == 0
    matches(text.splitlines()[:1], ["paca_vit_nano: val accuracy #% after 1 of 1 epochs (# s)"])
    assert err.startswith("resumed after step 2\nmodel ")


def test_evaluation(vtok_with_progress: Vtok, checkpoint: Path, data: str) -> None:
    given = ("--checkpoint", checkpoint, "--data", data, "--batch", "16", "--device", "cpu")
    code, text, err = vtok_with_progress("eval", *given)
    assert code == 0
    assert text.startswith("accuracy ")
    matches(
        err.splitlines(),
        [
            f"model   paca_vit_nano of {checkpoint}, 0.59 M parameters, input 32×32",
            "task    classify, 10 classes",
            f"data    {data}, split val, 30 images",
            f"device  {DEVICE}",
            "evaluate: 1 of 2 batches, # images/s, # s left",
            "evaluate: 2 of 2 batches, # images/s, 0 s left",
        ],
    )


def test_prediction(vtok_with_progress: Vtok, checkpoint: Path, folder: Path) -> None:
    images = (folder / "0.png", folder / "broken.png", folder / "1.png")
    code, text, err = vtok_with_progress("predict", *images, "--checkpoint", checkpoint, "--device", "cpu")
    assert code == 1
    assert text.startswith(f"{images[0]}\n")
    matches(
        err.splitlines()[:-2],
        [
            f"model   paca_vit_nano of {checkpoint}, 0.59 M parameters, input 32×32",
            "task    classify, 10 classes",
            "data    3 images",
            f"device  {DEVICE}",
            "predict: 1 of 3 images, # images/s, # s left",
            "predict: 2 of 3 images, # images/s, # s left",
            "predict: 3 of 3 images, # images/s, 0 s left",
        ],
    )
    assert err.splitlines()[-2] == "could not be read (1):"
    one = vtok_with_progress("predict", images[0], "--checkpoint", checkpoint, "--device", "cpu")
    assert [line.split()[0] for line in one[2].splitlines()] == ["model", "task", "data", "device"]


def test_reduction(vtok_with_progress: Vtok, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "interleave", partial(interleave, min_seconds=0.0, retries=0))
    given = ("--size", "32", "--method", "random", "--keep", "0.5", "--rounds", "1", "--batch", "2")
    code, text, err = vtok_with_progress(
        "reduce", "deit_tiny_patch16_224", *given, "--data", data, "--images", "2"
    )
    assert code == 0
    assert "keep 0.5" in text
    lines = err.splitlines()
    matches(
        lines[:7],
        [
            "model   deit_tiny_patch16_224, 5.68 M parameters, input 32×32",
            "method  random",
            f"data    {data}, split val, 2 images, 10 classes",
            f"device  {DEVICE}",
            "read: 1 of 2 images, # images/s, # s left",
            "read: 2 of 2 images, # images/s, 0 s left",
            "measure the speed: # schedules and the full model, 1 round",
        ],
    )
    assert lines[7:]
    assert all(re.match(r"evaluate: \d of \d schedules, ", line) for line in lines[7:])


def test_explanations(
    vtok_with_progress: Vtok, checkpoint: Path, folder: Path, data: str, tmp_path: Path
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "0.png").write_bytes((folder / "0.png").read_bytes())
    page, picture = tmp_path / "x.html", tmp_path / "x.png"
    given = ("--checkpoint", checkpoint, "--device", "cpu", "--save")
    err = vtok_with_progress("explain", tmp_path / "photos", *given, page)[2]
    head = [
        f"model   paca_vit_nano of {checkpoint}, 0.59 M parameters, input 32×32",
        "task    classify, 10 classes",
        f"data    {tmp_path / 'photos'}",
        f"device  {DEVICE}",
        f"output  {page}",
        "explain: 1 of 1 file, # images/s, 0 s left",
    ]
    matches(err.splitlines(), head)
    measure = ("--faithfulness", "--data", data, "--images", "1", "--steps", "2", "--methods", "random")
    err = vtok_with_progress("explain", *given, picture, *measure)[2]
    head[2], head[4] = f"data    {data}, split val, 1 image", f"output  {picture}"
    matches(err.splitlines(), [*head[:5], "evaluate: 1 of 1 image, # images/s, 0 s left"])


def test_bars_on_a_terminal(data: str, tmp_path: Path) -> None:
    """stderr is a terminal, stdout is not."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, 150))
    options = ["--model", "paca_vit_nano", "--data", data, "--out", str(tmp_path / "run"), "--epochs", "1"]
    with subprocess.Popen(
        [VTOK, "train", *options, "--batch", "32", "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env=ENVIRONMENT | {"TERM": "dumb"},
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
        assert process.stdout is not None
        out = process.stdout.read()
    os.close(ours)
    assert process.returncode == 0
    assert out.startswith("paca_vit_nano: val accuracy ")
    text = shown.decode()
    assert re.search(r"epoch 1/1:   0%.*\| 0/2 \[00:00<\?, — images/s\]", text)
    assert re.search(
        rf"epoch 1/1: 100%.*\| 2/2 \[\d\d:\d\d<00:00, {NUMBER} images/s, loss {NUMBER}, accuracy", text
    )
    assert re.search(rf"evaluate: 100%.*\| 1/1 \[\d\d:\d\d<00:00, {NUMBER} images/s\]", text)
    assert "steps, " not in text, "no lines besides the bars"
    whole = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").splitlines()]
    assert whole[0].startswith("model   paca_vit_nano, ")
    assert any(line.startswith("epoch 1/1: loss ") for line in whole), "on a line of its own"


def test_the_best_epoch_is_named() -> None:
    history = [{"val_miou": value} for value in (0.5, 0.75, 0.25)]
    result = TrainResult(
        out="my run",
        classes=["a", "b"],
        history=history,
        score="miou",
        evaluation=SimpleNamespace(metrics={"miou": 0.25, "loss": 1.0}),
        seconds=7500.0,
        images_per_second=0.334,
        data_wait=0.5,
        unreadable=(),
        skipped=0,
    )
    config = TrainConfig(model="fpn", task="segment", data="masks:my photos", out="my run", epochs=3)
    assert _text(config, result).splitlines() == [
        "fpn: val mIoU 25.0% after 3 of 3 epochs "
        "(2 h 5 min, 0.33 images/s, 50.0% of the time waiting for images)",
        "best epoch 2: val mIoU 75.0%, in my run/best",
        "saved in my run",
        "try: vtok eval --checkpoint 'my run' --data 'masks:my photos'",
        "try: vtok predict photo.jpg --checkpoint 'my run'",
    ]


def test_suggested_commands_work(
    vtok: Vtok, folder: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photo.jpg").write_bytes((folder / "0.png").read_bytes())
    given = ("--model", "paca_vit_nano", "--data", data, "--out", "my run", "--epochs", "1", "--size", "40")
    text = vtok("train", *given, "--device", "cpu")[1]
    commands = [
        shlex.split(line.removeprefix("try: ")) for line in text.splitlines() if line.startswith("try: ")
    ]
    assert [command[:2] for command in commands] == [["vtok", "eval"], ["vtok", "predict"]]
    for _, *arguments in commands:
        code, out, err = vtok(*arguments)
        assert (code, err) == (0, "")
        assert out
