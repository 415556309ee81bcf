"""The output folder of a run: what is refused, replaced and kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.train.helpers import Make, history, same, signal_at, weights
from visualtokens.errors import UserError
from visualtokens.train import CannotSave, train

V1 = Path(__file__).parents[1] / "data" / "checkpoint_v1"


def test_folder_that_holds_a_run_is_refused_without_overwrite(config: Make) -> None:
    train(config(epochs=1))
    before = weights(config())
    with pytest.raises(UserError, match="already holds a run; give --resume, --overwrite or another --out"):
        train(config(epochs=1, seed=1))
    assert same(weights(config()), before)
    train(config(epochs=1, seed=1, overwrite=True))
    assert not same(weights(config()), before)
    assert len(history(config())) == 1


def test_overwrite_removes_the_old_run(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    train(config(epochs=1))
    other = Path(config().out) / "mine.txt"
    other.write_text("not of the run")
    signal_at(monkeypatch, step=0)
    train(config(epochs=1, overwrite=True))  # ends before its first evaluation
    assert sorted(path.name for path in Path(config().out).iterdir()) == [
        *("config.json", "mine.txt", "model.safetensors", "options.json", "snapshots", "steps.jsonl")
    ]


def test_wrong_options_do_not_delete_the_old_run(config: Make) -> None:
    train(config(epochs=1))
    before = weights(config())
    mistakes: list[dict[str, Any]] = [
        *({"model": "paca_vit_nan"}, {"data": "digit"}, {"augment": "foto"}, {"device": "gpu"}),
        *({"optimizer": "adamv"}, {"auto_augment": "ran-m9"}, {"task": "clasify"}, {"teacher": "resnet1"}),
    ]
    for mistake in mistakes:
        with pytest.raises(UserError, match=r"^unknown "):
            train(config(overwrite=True, **mistake))
    assert same(weights(config()), before)


def test_resume_refuses_other_settings_and_empty_folders(config: Make) -> None:
    with pytest.raises(UserError, match="nothing to resume"):
        train(config(resume=True))
    train(config(epochs=1, lr=1e-3))
    with pytest.raises(UserError, match=r"has lr=0\.001, not 0\.002"):
        train(config(epochs=1, lr=2e-3, resume=True))
    with pytest.raises(UserError, match=r"has optimizer='adamw', not 'lamb'"):
        train(config(epochs=1, optimizer="lamb", resume="auto"))


def test_out_must_be_a_folder(config: Make, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(UserError, match="is a file; give a folder"):
        train(config())
    assert (tmp_path / "run").read_text() == "mine"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": "auto"}], ids=str)
@pytest.mark.parametrize("name", ["best/mine.txt", "tensorboard/mine", "snapshots/a/b", "model.safetensors"])
def test_files_of_others_are_refused(config: Make, name: str, options: dict[str, Any]) -> None:
    out = Path(config().out)
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    with pytest.raises(UserError, match=r"is not part of a run.*; move it away, or give another --out") as e:
        train(config(epochs=1, **options))
    assert str(out / Path(name).parts[0]) in str(e.value)
    assert "\n" not in str(e.value)
    assert content(out) == {name: b"mine"}


@pytest.mark.parametrize("text", ['{"colour": "blue"}', "{", "[]"])
def test_options_of_another_program_are_refused(config: Make, text: str) -> None:
    out = Path(config().out)
    out.mkdir()
    (out / "options.json").write_text(text)
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(UserError, match=r"options\.json .*or give another --out"):
            train(config(epochs=1, **options))
    assert content(out) == {"options.json": text.encode()}


def test_other_files_are_kept(config: Make) -> None:
    """Also by a run that resumes, and by one that replaces another."""
    out = Path(config().out)
    out.mkdir()
    mine = [".notes.tmp", "notes.txt", "best/notes.txt", "snapshots/.notes.tmp", "tensorboard/notes.txt"]
    for name in mine[:2]:
        (out / name).write_text("mine")
    train(config(epochs=1))
    (out / "tensorboard").mkdir()
    events = out / "tensorboard" / "events.out.tfevents.1700000000.host.17.0"
    events.write_text("of the run")
    for name in mine[2:]:
        (out / name).write_text("mine")
    train(config(epochs=2, resume=True))
    assert events.exists()
    train(config(epochs=1, overwrite=True, seed=1))
    assert [(out / name).read_text() for name in mine] == ["mine"] * len(mine)
    assert not events.exists()
    assert [path.name for path in (out / "snapshots").glob("epoch*")] == ["epoch_0001_step_00000003"]


def test_temporary_files_of_a_killed_run_are_removed(config: Make) -> None:
    out = Path(config().out)
    train(config(epochs=1))
    left = [out / ".vtok-log.jsonl.17.tmp", out / "best" / ".vtok-config.json.17.tmp"]
    for path in left:
        path.write_text("half")
    (out / "snapshots" / ".vtok-epoch_0002_step_00000006.17.tmp").mkdir()
    train(config(epochs=1, resume=True))
    assert not list(out.rglob(".vtok*"))


def test_a_failed_overwrite_can_be_repeated(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    train(config(epochs=1))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(OSError("disk gone")))
        with pytest.raises(CannotSave, match="disk gone"):
            train(config(epochs=1, overwrite=True))
    assert (Path(config().out) / "options.json").exists(), "it still holds a run"
    train(config(epochs=1, overwrite=True))
    assert not list(Path(config().out).rglob(".vtok*"))


def test_older_run_is_overwritten(config: Make, tmp_path: Path) -> None:
    out = Path(shutil.copytree(V1, tmp_path / "v1"))
    with pytest.raises(UserError, match="already holds a run"):
        train(config(out=str(out)))
    train(config(out=str(out), epochs=1, overwrite=True))
    assert [path.name for path in (out / "snapshots").iterdir()] == ["epoch_0001_step_00000003"]
    assert json.loads((out / "options.json").read_text())["epochs"] == 1
