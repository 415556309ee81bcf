"""Atomic writes and their failures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from visualtokens.files import (
    CannotSave,
    link,
    remove_folder,
    remove_leftovers,
    saving,
    write_atomically,
    write_folder,
)


def test_write_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("a long old text")
    write_atomically(path, lambda p: p.write_text("new"))
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_old_file_is_kept_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")

    def write(temporary: Path) -> None:
        assert temporary != path
        assert temporary.parent == path.parent, "a rename is atomic only within one file system"
        temporary.write_text("half")
        assert path.read_text() == "old"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, write)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_open_readers_keep_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with path.open() as reader:
        write_atomically(path, lambda p: p.write_text("new"))
        assert reader.read() == "old"


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record flushes and renames in order."""
    events: list[str] = []
    replace, rename, fsync = os.replace, os.rename, os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append("rename"), replace(old, new)))
    monkeypatch.setattr(os, "rename", lambda old, new: (events.append("rename"), rename(old, new)))
    return events


def test_the_content_is_on_the_disk_before_the_name_points_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = watch(monkeypatch)
    write_atomically(tmp_path / "file.txt", lambda p: p.write_text("new"))
    assert events == ["fsync", "rename", "fsync"]


def fill(folder: Path) -> None:
    (folder / "a").write_text("1")
    (folder / "b").write_text("2")


def test_a_folder_appears_when_it_is_whole_and_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = watch(monkeypatch)
    write_folder(tmp_path / "many" / "folder", fill)
    assert events == ["fsync", "fsync", "fsync", "rename", "fsync"]
    assert sorted(path.name for path in (tmp_path / "many").rglob("*")) == ["a", "b", "folder"]


def test_partial_folder_never_appears(tmp_path: Path) -> None:
    def half(folder: Path) -> None:
        (folder / "a").write_text("1")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_folder(tmp_path / "folder", half)
    assert list(tmp_path.iterdir()) == []


def test_remove_folder_renames_it_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "folder", fill)
    monkeypatch.setattr("shutil.rmtree", lambda path: None)  # killed at this point
    remove_folder(tmp_path / "folder")
    monkeypatch.undo()
    assert not (tmp_path / "folder").exists()
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / ".vtok-x.json.123.tmp").write_text("left by a process that was killed")
    others = [".notes.123.tmp", ".vtok-notes.tmp", ".vtok-x.json.123.tmp.bak", "keep.tmp"]
    for name in others:
        (tmp_path / name).write_text("not ours")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == others


@pytest.mark.parametrize("links", [True, False])
def test_link_replaces_the_target_and_keeps_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", lambda source, target: (_ for _ in ()).throw(OSError("not here")))
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("new")
    target.write_text("old")
    link(source, target)
    assert (source.read_text(), target.read_text()) == ("new", "new")
    assert os.path.samefile(source, target) == links


def test_failure_states_folder_reason_and_fallback(tmp_path: Path) -> None:
    with (
        pytest.raises(CannotSave, match=r"in '.*' \([\d,]+ MB free\): .*No space.*; all is well$"),
        saving(tmp_path, "all is well"),
    ):
        raise OSError(28, "No space left on device")
