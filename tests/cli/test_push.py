"""``vtok push``: the folder of a repository, and failures of one line; tests/hub pushes to a hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Vtok = Callable[..., tuple[int, str, str]]


def test_folder_of_a_repository(vtok: Vtok, checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    arguments = (
        "push",
        "me/digits",
        "--checkpoint",
        checkpoint,
        "--out",
        tmp_path / "new",
        "--license",
        "mit",
    )
    code, text, err = vtok(*arguments, "--examples", folder / "0.png", "--json")
    assert (code, err) == (0, "")
    assert json.loads(text) == {"saved": str(tmp_path / "new")}
    assert "hf-hub:me/digits" in (tmp_path / "new" / "README.md").read_text("utf-8")
    assert (tmp_path / "new" / "example_1.png").is_file()
    code, text, _ = vtok("predict", folder / "0.png", "--checkpoint", f"local-dir:{tmp_path / 'new'}")
    assert code == 0


def test_without_token(vtok: Vtok, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    code, text, err = vtok("push", "me/digits", "--checkpoint", checkpoint)
    assert (code, text) == (2, "")
    assert err == (
        "error: pushing to the Hugging Face Hub needs a token; log in with `hf auth login`, or set HF_TOKEN "
        "to a token with write access\n"
    )


def test_wrong_arguments(vtok: Vtok, checkpoint: Path, tmp_path: Path) -> None:
    code, _, err = vtok("push", "a/b/c", "--checkpoint", checkpoint, "--out", tmp_path / "new")
    assert (code, "'a/b/c' is not the name of a repository" in err) == (2, True)
    code, _, err = vtok("push", "--checkpoint", checkpoint)
    assert (code, err) == (2, "error: REPO must be given; --help shows an example\n")
    code, _, err = vtok("push", "me/x", "--checkpoint", tmp_path / "nowhere", "--out", tmp_path / "new")
    assert (code, "does not exist; a checkpoint is a folder" in err) == (2, True)
