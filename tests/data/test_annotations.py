"""What the annotation files of all layouts share."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from visualtokens.data.annotations import (
    Ragged,
    boxes_as_objects,
    check_names,
    divide,
    files_by_name,
    is_near,
    read_lines,
    to_number,
)
from visualtokens.data.base import held_out
from visualtokens.errors import UserError


@pytest.mark.parametrize(
    ("low", "length", "expected"),
    [
        (0, 10, True),
        (-10, 11, True),
        (-10, 30, True),
        (9, 11, True),
        (-10, 10, False),  # it only touches
        (10, 5, False),
        (-10, 31, False),
        (-11, 30, False),
        (12, 0, True),  # dropped later
        (25, 0, False),
        (float("nan"), 1, False),
    ],
)
def test_intervals_must_overlap_and_stay_near(low: float, length: float, expected: bool) -> None:
    assert is_near(low, length, 10) == expected


def test_ragged_arrays() -> None:
    parts = [np.arange(2), np.empty(0, int), np.arange(3)]
    ragged = Ragged(parts, like=np.empty(0, int))
    assert len(ragged) == 3
    assert all(np.array_equal(ragged[i], part) for i, part in enumerate(parts))
    assert ragged.ends.tolist() == [2, 2, 5]
    empty = Ragged([], like=np.empty((0, 4)))
    assert (len(empty), empty.values.shape) == (0, (0, 4))


def test_objects_do_not_share_memory_with_the_dataset() -> None:
    labels, boxes = np.array([1, 2]), np.array([[0.0, 1, 4, 3], [1, 1, 2, 2]])
    objects = boxes_as_objects(boxes, labels)
    objects.labels[:] = 7
    objects.boxes[:] = 7
    assert labels.tolist() == [1, 2]
    assert boxes[0].tolist() == [0, 1, 4, 3]
    assert objects.area.tolist() == [8, 1]
    masks = torch.zeros(2, 5, 5, dtype=torch.bool)
    masks[0, 0, 0] = True
    assert boxes_as_objects(boxes, labels, masks=masks).area.tolist() == [1, 0]


def test_numbers() -> None:
    assert [to_number(text) for text in ("1", " 2.5 ", "-1e3")] == [1, 2.5, -1000]
    assert [to_number(text) for text in (None, "", "x", "nan", "inf", "1e30", "1,5")] == [None] * 7


def test_undivided_data(tmp_path: Path) -> None:
    names = [f"{i}" for i in range(10)]
    chosen = np.flatnonzero(held_out(names, 0.3)).tolist()
    assert divide(names, "val", 0.3, source="x") == chosen
    assert divide(names, "train", 0.3, source="x") == [i for i in range(10) if i not in chosen]
    assert divide(names, "train", None, source="x") == list(range(10))
    with pytest.raises(UserError, match=r"x has no validation split; hold out a share: --val_share 0.2"):
        divide(names, "val", None, source="x")
    assert divide(names, "val", 1, source="x") == list(range(10))
    with pytest.raises(UserError, match="val_share=1 leaves no image of x to train on"):
        divide(names, "train", 1, source="x")
    with pytest.raises(UserError, match="x has no test split"):
        divide(names, "test", 0.3, source="x")


def test_files_by_name(tmp_path: Path) -> None:
    for name in ("b.jpg", "a/x.PNG", "a/.hidden.png", ".git/y.png", "a/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert files_by_name(tmp_path) == {"a/x": tmp_path / "a/x.PNG", "b": tmp_path / "b.jpg"}
    assert list(files_by_name(tmp_path, {".txt"})) == ["a/notes"]
    (tmp_path / "b.png").touch()
    with pytest.raises(UserError, match=r"b\.\w+ and .*b\.\w+ have the same name; rename one of them"):
        files_by_name(tmp_path)


def test_lines_of_any_encoding(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbfone\r\ncaf\xe9\n")
    lines = read_lines(tmp_path / "x")
    assert lines == ["one", os.fsdecode(b"caf\xe9")]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is not a file"):
        read_lines(tmp_path / "pipe")


def test_names_of_classes() -> None:
    assert check_names("cat", "classes") == check_names(["cat"], "classes") == ["cat"]
    with pytest.raises(UserError, match="x: the class 3 is not a name; give text"):
        check_names(["cat", 3], "x")  # type: ignore[list-item]
    with pytest.raises(UserError, match=r"x: the class 'aaa.* is longer than 1,000 characters"):
        check_names(["a" * 1001], "x")
    with pytest.raises(UserError, match="x has 0 classes"):
        check_names([], "x")
