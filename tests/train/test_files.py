from __future__ import annotations

import os
from pathlib import Path

import pytest

from visualtokens.train.files import write_atomically


def test_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("a long old text")
    write_atomically(path, lambda p: p.write_text("new"))
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
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


def test_who_reads_the_old_file_keeps_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with path.open() as reader:
        write_atomically(path, lambda p: p.write_text("new"))
        assert reader.read() == "old"


def test_the_content_is_on_the_disk_before_the_name_points_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append("rename"), replace(old, new)))
    write_atomically(tmp_path / "file.txt", lambda p: p.write_text("new"))
    assert events[:2] == ["fsync", "rename"]
