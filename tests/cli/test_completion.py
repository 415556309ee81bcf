"""Completion scripts, asked in real shells."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from timm.optim import list_optimizers

import visualtokens
from visualtokens.cli import completion
from visualtokens.cli.app import VERBS
from visualtokens.cli.completion import all_options
from visualtokens.data import PRESETS
from visualtokens.data.catalog import CLASSIFICATION, DETECTION, SEGMENTATION
from visualtokens.data.segmentation import SEGMENT_PRESETS
from visualtokens.papers.figures import published
from visualtokens.reduce import METHODS
from visualtokens.tasks.task import _BUILT_IN
from visualtokens.train.config import LOGS, TrainConfig

Vtok = Callable[..., tuple[int, str, str]]
ASK_BASH = """
source "$1"; shift
COMP_LINE=$1 COMP_POINT=${#1}; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_vtok
printf '%s\\n' "${COMPREPLY[@]}"
"""

# Lines, and what follows their last word, or its part after = and :.
LINES = {
    "vtok tr": ["train"],
    "vtok help pa": ["papers"],
    "vtok train --ta": ["--task"],
    "vtok train --task ": ["classify", "detect", "segment"],
    "vtok train --task=s": ["segment"],
    "vtok train --lr ": [],
    "vtok train --bf16 --sched": ["--schedule"],
    "vtok train --schedule ": ["cosine", "poly", "step"],
    "vtok train --model mask_r": ["mask_rcnn"],
    "vtok bench paca_vit_n": ["paca_vit_nano"],
    "vtok reduce --method weighted_kmed": ["weighted_kmedoids"],
    "vtok eval --split ": ["test", "train", "val"],
    "vtok eval --checkpoint ru": ["runs"],
    "vtok predict ph": ["photo 1.jpg", "photos"],
    "vtok train --data fo": ["folder:"],
    "vtok train --data folder:pho": ["photo 1.jpg", "photos"],
    "vtok train --data=npz:x": ["x.npz"],
    "vtok completion z": ["zsh"],
}
lines = pytest.mark.parametrize(("line", "expected"), LINES.items(), ids=list(LINES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to complete files in."""
    root = tmp_path_factory.mktemp("files")
    for name in ("photos", "runs"):
        (root / name).mkdir()
    for name in ("photo 1.jpg", "run.yaml", "x.npz"):
        (root / name).touch()
    return root


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts, named after their shells."""
    root = tmp_path_factory.mktemp("scripts")
    for shell in completion.SHELLS:
        result = completion.run(completion.CompletionConfig(shell=shell))
        (root / shell).write_text(result.text + "\n")
    return root


def needs(shell: str) -> str:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    return path


def ask_bash(script: Path, folder: Path, line: str) -> list[str]:
    """What bash would offer; it splits words at = and : as well."""
    words = [part for word in line.split(" ") for part in re.findall("[=:]|[^=:]+", word) or [""]]
    command = [needs("bash"), "--norc", "-c", ASK_BASH, "_", str(script), line, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return sorted(filter(None, done.stdout.splitlines()))


@lines
def test_bash(scripts: Path, folder: Path, line: str, expected: list[str]) -> None:
    assert ask_bash(scripts / "bash", folder, line) == expected


def test_bash_completes_nested_options(scripts: Path, folder: Path) -> None:
    assert ask_bash(scripts / "bash", folder, "vtok train --model_") == ["--model_args."]


@lines
def test_fish(scripts: Path, folder: Path, line: str, expected: list[str]) -> None:
    code = f"source {scripts / 'fish'}; complete -C '{line}'"
    command = [needs("fish"), "--no-config", "-c", code]
    home = {"HOME": str(folder)} | {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, env=home)
    found = [each.partition("\t")[0] for each in done.stdout.splitlines()]
    # fish returns whole words
    prefix = line.rpartition(" ")[2]
    prefix = prefix[: max(prefix.rfind("="), prefix.rfind(":")) + 1]
    assert sorted(each.removeprefix(prefix).rstrip("/").replace("\\ ", " ") for each in found) == expected


def completed(shell: list[str], setup: str, line: str, folder: Path) -> str:
    """What the terminal shows of a line after the tabulator key, in an interactive shell."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(shell[0], shell, os.environ | {"TERM": "dumb", "PS1": "> ", "HOME": str(folder)})
    try:
        os.write(terminal, f"{setup}; echo REA''DY\n".encode())
        _read_until(terminal, b"READY\r\n")
        os.write(terminal, line.encode() + b"\t\x18")  # then the key that the set-up binds to `echo DONE`
        return _read_until(terminal, b"DONE").decode()
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def _read_until(terminal: int, mark: bytes) -> bytes:
    text, deadline = b"", time.monotonic() + 60
    while mark not in text:
        assert time.monotonic() < deadline, text
        if select.select([terminal], [], [], 0.5)[0]:
            with contextlib.suppress(OSError):
                text += os.read(terminal, 65536)
    return text


ZSH = """unsetopt prompt_sp zle_bracketed_paste; autoload -U compinit; compinit -u -D; source {script}
done_() {{ zle -M "${{BUFFER}}|DONE" }}; zle -N done_; bindkey '^X' done_"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vtok tr", "vtok train "),
        ("vtok help pa", "vtok help papers "),
        ("vtok train --ta", "vtok train --task="),
        ("vtok train --task=s", "vtok train --task=segment "),
        ("vtok train --task s", "vtok train --task segment "),
        ("vtok train --lr ", "vtok train --lr "),
        ("vtok train --data fo", "vtok train --data folder:"),
        ("vtok train --data folder:photos", "vtok train --data folder:photos/"),
        ("vtok train --data=npz:x", "vtok train --data=npz:x.npz "),
        ("vtok eval --checkpoint ru", "vtok eval --checkpoint runs/"),
        ("vtok predict x", "vtok predict x.npz "),
        ("vtok bench paca_vit_n", "vtok bench paca_vit_nano "),
    ],
)
def test_zsh(scripts: Path, folder: Path, line: str, expected: str) -> None:
    shown = completed([needs("zsh"), "-f", "-i"], ZSH.format(script=scripts / "zsh"), line, folder)
    assert f"{expected}|DONE" in shown


def test_bash_on_a_terminal(scripts: Path, folder: Path) -> None:
    """With readline, which splits the words and quotes the blank."""
    setup = f'source {scripts / "bash"}; bind -x \'"\\C-x": printf "%s|DONE" "$READLINE_LINE"\''
    shell = [needs("bash"), "--norc", "--noprofile", "-i"]
    for line, expected in (
        ("vtok train --data fo", "vtok train --data folder:"),
        ("vtok train --data folder:photo\\ ", "vtok train --data folder:photo\\ 1.jpg "),
        ("vtok train --data=npz:x", "vtok train --data=npz:x.npz "),
        ("vtok train --model_", "vtok train --model_args."),
        ("vtok train --ta", "vtok train --task "),
        ("vtok eval --checkpoint ru", "vtok eval --checkpoint runs/"),
    ):
        assert f"{expected}|DONE" in completed(shell, setup, line, folder)


def test_every_option_is_completed() -> None:
    options = {verb: {option.name for option in found} for verb, found in all_options().items()}
    assert set(options) == set(VERBS)
    assert {f"--{name}" for name in TrainConfig.names()} <= options["train"]
    assert {"--lambda", "--train"} <= options["reduce"]
    assert all({"--json", "--config", "--help"} <= names for names in options.values())


def test_suggested_values_exist() -> None:
    words = completion.WORDS
    assert set(words["method"]) == set(METHODS)
    assert set(words["task"]) == set(_BUILT_IN)
    assert set(words["log"]) == set(LOGS)
    assert set(words["paper"]) == {figure.paper for figure in published()}
    assert set(words["optimizer"]) <= set(list_optimizers())
    assert set(words["augment"]) >= {*PRESETS, *SEGMENT_PRESETS}
    by_name = {option.name: option for option in all_options()["train"]}
    assert set(visualtokens.list_models()) <= set(by_name["--model"].words)
    kinds = {word.rstrip(":") for word in by_name["--data"].words}
    assert kinds == {"digits", "digit_scenes", *CLASSIFICATION, *DETECTION, *SEGMENTATION}


def test_paths_are_recognised() -> None:
    kinds = {verb: {o.name: o.kind for o in found} for verb, found in all_options().items()}
    train = {name for name, kind in kinds["train"].items() if kind == "folder"}
    assert train == {"--teacher", "--out"}
    assert kinds["train"]["--init"] == "file"
    reduce = {name for name, kind in kinds["reduce"].items() if kind == "file"}
    assert reduce == {"--weights", "--save", "--plan", "--config"}
    assert kinds["reduce"][""] == "folder"
    assert kinds["predict"][""] == kinds["explain"][""] == kinds["explain"]["--save"] == "file"
    assert kinds["explain"]["--masks"] == kinds["eval"]["--checkpoint"] == kinds["demo"]["--out"] == "folder"


def test_unknown_shell(vtok: Vtok) -> None:
    assert vtok("completion", "tcsh") == (2, "", "error: unknown shell 'tcsh'; did you mean 'zsh'?\n")
    assert vtok("completion") == (2, "", "error: SHELL must be given; --help shows an example\n")
