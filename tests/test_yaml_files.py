"""YAML of unknown origin: plain values only, limits, and errors of one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from visualtokens.errors import UserError
from visualtokens.yaml_files import read_yaml


def test_plain_values_and_aliases(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("a: &a [1, x]\nb: *a\nc: {d: null}\n")
    assert read_yaml(file, what="data file") == {"a": [1, "x"], "b": [1, "x"], "c": {"d": None}}
    file.write_text("")
    assert read_yaml(file, what="data file") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "is not YAML: expected ',' or ']', but got '<stream end>' in line 1"),
        (b"a: \x00", "is not YAML: unacceptable character #x0000: special characters are not allowed in"),
        (b"\xff\xfe\x00", "is not text; it must be YAML"),
        (b"a: 2024-99-99", "holds a value that is not YAML: month must be in 1..12"),
        (b"a: &a [*a]", "has more than 100,000 values with its aliases expanded; leave the aliases out"),
        (b"[" * 100_000, "is nested too deeply"),
        (b"a" * 1_000_001, "has 1.0 MB; at most 1 MB are read"),
        (b"a: !!python/object/apply:os.system [ls]", "is not YAML: could not determine a constructor"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_yaml(file, what="data file")
    assert str(caught.value).startswith(f"data file '{file}' {message}")
    assert "\n" not in str(caught.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read data file '.*': No such file or directory"):
        read_yaml(tmp_path / "x", what="data file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is not a regular file"):
        read_yaml(tmp_path / "pipe", what="data file")
