"""Names, numbers and colours of classes in options and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from visualtokens.data.class_files import CLASS_FILES, MAX_TEXT, open_classes, read_classes, read_lines
from visualtokens.data.mask_classes import Label
from visualtokens.errors import UserError

PLAIN = [Label("road", 0), Label("traffic light", 1)]
COLOURED = [Label("road", 0, (128, 64, 128)), Label("traffic light", 1, (0, 64, 64))]
NUMBERED = [Label("road", 7), Label("traffic light", 19)]
BOTH = [Label("road", 7, (128, 64, 128)), Label("traffic light", 19, (0, 64, 64))]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("classes.txt", "road\r\ntraffic light\r\n\r\n", PLAIN),
        ("classes.txt", "\ufeffroad\n traffic light ", PLAIN),
        ("label_colors.txt", "128 64 128\tRoad\n0 64 64\t\ttraffic light\n".replace("R", "r"), COLOURED),
        ("label_colors.txt", "128,64,128,road\n0,64,64,traffic light\n", COLOURED),
        (
            "labelmap.txt",
            "# label:color_rgb:parts:actions\nroad:128,64,128::\ntraffic light:0,64,64::\n",
            COLOURED,
        ),
        ("colors.txt", "road 128 64 128\ntraffic light 0 64 64\n", COLOURED),
        ("class_dict.csv", "name,r,g,b\nroad,128,64,128\ntraffic light,0,64,64\n", COLOURED),
        ("x.csv", "Class;Red;Green;Blue\nroad;128;64;128\ntraffic light;0;64;64\n", COLOURED),
        ("x.csv", "road,128,64,128\n\ntraffic light,0,64,64\n", COLOURED),
        ("x.csv", "road\ntraffic light\n", PLAIN),
        ("_classes.csv", "Pixel Value, Class\n7, road\n19, traffic light\n", NUMBERED),
        ("x.csv", "id,name,color\n7,road,#804080\n19,traffic light,0 64 64\n", BOTH),
        ("classes.json", '["road", "traffic light"]', PLAIN),
        ("id2label.json", '{"7": "road", "19": "traffic light"}', NUMBERED),
        ("label2id.json", '{"road": 7, "traffic light": 19}', NUMBERED),
        ("x.json", '{"road": [128, 64, 128], "traffic light": "#004040"}', COLOURED),
        ("x.json", '{"classes": [{"title": "road"}, {"title": "traffic light"}]}', PLAIN),
        (
            "x.json",
            json.dumps({"labels": [{"name": n, "id": i, "color": c} for n, i, c in BOTH]}),
            BOTH,
        ),
    ],
)
def test_files_that_people_have(tmp_path: Path, name: str, text: str, expected: list[Label]) -> None:
    (tmp_path / name).write_bytes(text.encode())
    assert open_classes(name, None, tmp_path) == expected
    assert open_classes(str(tmp_path / name), None, tmp_path / "elsewhere") == expected
    assert (open_classes(None, None, tmp_path) == expected) == (name in CLASS_FILES)


def test_the_first_of_several_files_is_used(tmp_path: Path) -> None:
    assert open_classes(None, None, tmp_path) is None
    (tmp_path / "train").mkdir()
    (tmp_path / "train/classes.txt").write_text("c")
    assert open_classes(None, None, tmp_path) == [Label("c", 0)]
    (tmp_path / "label_colors.txt").write_text("1 2 3 b")
    assert open_classes(None, None, tmp_path) == [Label("b", 0, (1, 2, 3))]
    (tmp_path / "classes.txt").write_text("a")
    assert open_classes(None, None, tmp_path) == [Label("a", 0)]


def test_options_without_a_file(tmp_path: Path) -> None:
    assert open_classes(["a", 7], None, tmp_path) == [Label("a", 0), Label("7", 1)]
    assert open_classes({"3": "a", 4: "b"}, None, tmp_path) == [Label("a", 3), Label("b", 4)]
    expected = [Label("a", 0, (1, 2, 3)), Label("b", 1, (4, 5, 6))]
    assert open_classes(["a", "b"], [[1, 2, 3], "4,5,6"], tmp_path) == expected
    assert open_classes(["a", "b"], {"b": [4, 5, 6], "a": "#010203"}, tmp_path) == expected
    assert open_classes(None, {"a": [1, 2, 3], "b": [4, 5, 6]}, tmp_path) == expected


@pytest.mark.parametrize(
    ("classes", "colors", "message"),
    [
        ("no.txt", None, "classes='no.txt' is not a file here or in"),
        (3, None, "classes=3 is not a list of names; write [road, sky]"),
        ([], None, "classes names 0 classes"),
        ([["a"]], None, "classes: ['a'] is not the name of a class"),
        ([{"id": 3}], None, "classes: {'id': 3} has no name"),
        (["a", "a"], None, "classes names the class 'a' twice"),
        (["a", " "], None, "classes has a class without a name"),
        ([{"name": "a", "id": 3}, {"name": "b", "id": 3}], None, "names the number 3 twice"),
        ([{"name": "a", "id": 3}, "b"], None, "has no number for 'b'; give one for every class"),
        ([{"name": "a", "id": -1}], None, "a has the number -1; give one from 0 to 65535"),
        ([{"name": "a", "color": "red"}], None, "a has the colour 'red'; write 128,64,128 or #804080"),
        (None, [[1, 2, 3]], "colors=[[1, 2, 3]] needs names; give --data_args.classes"),
        (["a", "b"], [[1, 2, 3]], "must be 2 colours, one for each class, such as {a: [128, 64, 128], …}"),
        (["a"], {"a": [1, 2, 3], "c": [1, 2, 3]}, "unknown class in colors 'c'"),
        (["a", "b"], {"a": [1, 2, 3]}, "colors has no colour for 'b'"),
        (["a"], ["1,2,300"], "colors: a has the colour '1,2,300'"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, classes: Any, colors: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        open_classes(classes, colors, tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.txt", "r,g,b,name\n1,2,3,a", "'r,g,b,name' has no colour, but other lines have one"),
        ("x.txt", "1 2 300 a", "a has the colour '1 2 300'"),
        ("x.csv", "n,colour\na,1", "has the columns 'n, colour'; expected name and perhaps r, g, b or value"),
        ("x.csv", "name,r,g,b\na,1,2,x", "a has the colour [1, 2, None]"),
        ("x.csv", 'name\n"' + "a" * 200_000 + '"', "is not a table: field larger than"),
        ("x.json", "{", "is not JSON"),
        ("x.json", "3", "x.json=3 is not a list of names"),
        ("x.txt", "a" * (MAX_TEXT + 1), "is larger than 1 MB; is it the right file?"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        read_classes(tmp_path / name)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


def test_lines_may_hold_any_bytes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"caf\xe9\n")
    assert read_lines(tmp_path / "x") == ["caf\udce9"]
    with pytest.raises(UserError, match="cannot be read"):
        read_lines(tmp_path / "y")
