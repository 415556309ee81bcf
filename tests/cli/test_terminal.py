"""Names that contain control characters, markup or bytes that are not UTF-8, in every kind of output."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.explain.stubs import check_self_contained
from visualtokens.explain import Explanation

from .processes import finish, start

Vtok = Callable[..., tuple[int, str, str]]
NAME = os.fsdecode(b"caf\xe9\x1b[2J\nforged\xff.png")
SHOWN = r"caf\xe9\x1b[2J\x0aforged\xff.png"
CLASSES = sorted(
    (
        *("\x1b]0;title\x07", "two\nlines", "\u202egnp.exe", "<script>alert(1)", os.fsdecode(b"caf\xe9")),
        *("\x9b31m", "$x$", "a\tb\r", "\u2066x", "×"),
    )
)


@pytest.fixture(scope="module")
def named(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with such class names."""
    copy = tmp_path_factory.mktemp("named") / "run"
    shutil.copytree(checkpoint, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"label_names": CLASSES}))
    return copy


@pytest.fixture
def photo(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "photos" / NAME
    path.parent.mkdir()
    path.write_bytes((folder / "0.png").read_bytes())
    return path


def assert_printable(text: str) -> None:
    found = re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", text)
    assert not found


@pytest.mark.parametrize(
    "variables", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "LANG": "C"}], ids=["ascii", "C"]
)
def test_predict_prints_one_printable_line_per_class(
    named: Path, photo: Path, variables: dict[str, str]
) -> None:
    missing = photo.with_name("no" + NAME)
    given = ("predict", photo, missing, "--checkpoint", named, "--top", "10")
    code, out, err = finish(start(*given, variables=variables))
    assert code == 1
    assert_printable(out + err)
    head, *rows = out.splitlines()
    assert head == f"{photo.parent}/{SHOWN}"
    assert len(rows) == 10
    ascii_only = "PYTHONIOENCODING" in variables
    shown = {re.fullmatch(r" +[\d.]+%  (.*)", row)[1] for row in rows}  # type: ignore[index]
    assert {r"\x1b]0;title\x07", r"two\x0alines", r"caf\xe9", r"\xd7" if ascii_only else "×"} < shown
    assert err.splitlines()[-2:] == ["could not be read (1):", f"  {photo.parent}/no{SHOWN}: no such file"]


def test_json_holds_the_exact_names(vtok: Vtok, named: Path, photo: Path) -> None:
    _, out, _ = vtok("predict", photo, "--checkpoint", named, "--top", "10", "--json")
    assert out.isascii()
    (prediction,) = json.loads(out)["predictions"]
    assert os.fsencode(prediction["image"]) == os.fsencode(photo)
    assert sorted(each["class"] for each in prediction["classes"]) == CLASSES


def test_explanations(vtok: Vtok, named: Path, photo: Path, tmp_path: Path) -> None:
    for target in (os.fsdecode(b"caf\xe9"), "<script>alert(1)", "two\nlines"):
        given = ("explain", photo, "--checkpoint", named, "--target", target, "--top", "1", "--save")
        page, picture, arrays = (tmp_path / f"{photo.stem}.{end}" for end in ("html", "png", "npz"))
        for path in (page, picture, arrays):
            code, out, err = vtok(*given, path)
            assert (code, err) == (0, "")
            assert_printable(out)
            assert "saved as" in out
        check_self_contained(page.read_text(encoding="utf-8"))
        assert np.asarray(Image.open(picture)).std() > 5
        loaded = Explanation.load(arrays)
        assert loaded.class_name(loaded.target) == target


def test_page_of_a_folder(vtok: Vtok, named: Path, photo: Path, tmp_path: Path) -> None:
    (photo.parent / os.fsdecode(b"<script>\xff.png")).write_bytes(b"no picture")
    code, out, err = vtok("explain", photo.parent, "--checkpoint", named, "--save", tmp_path / "x.html")
    assert code == 1
    assert_printable(out + err)
    assert out.splitlines()[1].startswith(SHOWN)
    assert len(out.splitlines()) == 4
    assert r"  <script>\xff.png: not an image" in err
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    check_self_contained(page)
    assert_printable(page)


def test_eval_of_a_folder(vtok: Vtok, named: Path, photo: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in CLASSES:
            (tmp_path / "data" / split / name).mkdir(parents=True)
            shutil.copyfile(photo, tmp_path / "data" / split / name / NAME)
    bad = tmp_path / "data" / "val" / CLASSES[0] / os.fsdecode(b"bad\xff.png")
    bad.write_bytes(b"no picture")
    given = ("eval", "--checkpoint", named, "--data", f"folder:{tmp_path / 'data'}")
    code, out, err = vtok(*given)
    assert code == 0
    assert_printable(out + err)
    assert len(out.splitlines()) == 3 + 10
    assert r"bad\xff.png: not an image" in err
    document = json.loads(vtok(*given, "--json")[1])
    assert document["unreadable"][0]["path"] == str(bad)


def test_error_messages(vtok: Vtok, named: Path) -> None:
    code, _, err = vtok("explain", NAME, "--checkpoint", named)
    assert code == 2
    assert_printable(err)
    assert err == r"error: cannot read caf\xe9\x1b[2J forged\xff.png: no such file" + "\n"
