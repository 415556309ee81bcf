"""``vtok data check``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.squares import write_pennfudan, write_yolo
from visualtokens.data import check

Vtok = Callable[..., tuple[int, str, str]]


def test_text_is_that_of_the_report(vtok: Vtok, tmp_path: Path) -> None:
    spec = write_yolo(tmp_path)
    code, text, err = vtok("data", "check", spec)
    assert (code, err) == (0, "")
    assert text == check(spec).text() + "\n"
    assert list(tmp_path.rglob("*_check.png")) == []


def test_options_and_json(vtok: Vtok, tmp_path: Path) -> None:
    spec = write_pennfudan(tmp_path / "data", images=10)
    out = tmp_path / "sheet.png"
    given = ("--val_share", "0.3", "--data_args.classes", "person", "--limit", "2", "--out", out, "--json")
    code, text, err = vtok("data", "check", *given, spec)
    assert (code, err) == (0, "")
    document = json.loads(text)
    assert document["classes"] == ["person"]
    assert {name: (s["images"], s["decoded"]) for name, s in document["splits"].items()} == {
        "train": (7, 2),
        "val": (3, 2),
    }
    assert document["sheet"] == str(out)
    with Image.open(out) as picture:
        assert picture.width > 1000


def test_bad_files_give_exit_code_1(vtok: Vtok, tmp_path: Path) -> None:
    spec = write_yolo(tmp_path)
    (tmp_path / "labels/val/1.txt").write_text("3 .5 .5 .1 .1\n")
    code, text, _ = vtok("data", "check", spec)
    assert code == 1
    assert f"bad files (1)\n  val: {tmp_path / 'labels/val/1.txt'}: annotation of image 1, line 1" in text
    document = json.loads(vtok("data", "check", spec, "--json")[1])
    assert [bad["split"] for bad in document["bad"]] == ["val"]


def test_the_task_can_be_chosen(vtok: Vtok) -> None:
    texts = [
        vtok("data", "check", "digit_scenes:32x32", "--limit", "1", *task)[1].splitlines()[0]
        for task in ((), ("--task", "segment"), ("--task", "detect"))
    ]
    assert [text.split(": ")[1].split(",")[0] for text in texts] == [
        "classification",
        "segmentation",
        "detection",
    ]


def test_a_picture_of_the_dataset_is_not_overwritten(vtok: Vtok, tmp_path: Path) -> None:
    spec = write_pennfudan(tmp_path, images=3)
    picture = tmp_path / "PNGImages/1.png"
    before = picture.read_bytes()
    code, _, err = vtok("data", "check", spec, "--out", picture)
    assert code == 2
    assert err.startswith(f"error: '{picture}' would overwrite the input")
    assert picture.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "ACTION and DATA must be given"),
        (("check",), "DATA must be given"),
        (("chek", "digits"), "unknown action 'chek'; did you mean 'check'?"),
        (("check", "digits", "more"), "unexpected argument 'more'"),
        (("check", "digits", "--out", "x.jpg"), "out='x.jpg' is not the name of a PNG file; end it in .png"),
        (("check", "digits", "--task", "detec"), "--task must be 'classify' or 'segment' or 'detect'"),
        (("check", "digits", "--limit", "0"), "limit=0 must be at least 1"),
        (("check", "yolo:/nowhere"), "/nowhere does not exist"),
        (("check", "digits", "--data_args.split", "x"), "digits has no options; leave split out"),
    ],
)
def test_mistakes(vtok: Vtok, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = vtok("data", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")


def test_a_config_file(vtok: Vtok, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("data: digits\nlimit: 1\n")
    code, text, _ = vtok("data", "check", "--config", tmp_path / "c.yaml")
    assert code == 0
    assert text.startswith("digits: classification, 10 classes")
