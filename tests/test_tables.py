from __future__ import annotations

import os

import pytest

from visualtokens.tables import metric_name, printable, table


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("häuser × 3 – 日本語 👩‍🔬 עברית", "häuser × 3 – 日本語 👩‍🔬 עברית"),
        ("\x1b[2J\x07\x00", r"\x1b[2J\x07\x00"),
        ("a\nb\r\tc", r"a\x0ab\x0d\x09c"),
        ("\x7f\x9b31m\x85", r"\x7f\x9b31m\x85"),
        ("\u202egpj.exe\u2066\u2028", r"\u202egpj.exe\u2066\u2028"),
        (os.fsdecode(b"caf\xe9"), r"caf\xe9"),
        ("\ud800", r"\ud800"),
    ],
)
def test_unprintable_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_kept_characters() -> None:
    assert printable("a\n\x1bb\n", keep="\n") == "a\n\\x1bb\n"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("accuracy", "accuracy"),
        ("miou", "mIoU"),
        ("pixel_accuracy", "pixel accuracy"),
        ("box_ap50", "box AP50"),
    ],
)
def test_names_of_metrics(name: str, shown: str) -> None:
    assert metric_name(name) == shown


def test_a_cell_of_a_table_is_one_printable_line() -> None:
    drawn = table([("a\nforged  9", "1"), ("\x1b[2J", "22")], header=("class", "n"), right=(1,))
    assert drawn.splitlines() == [
        r"class            n",
        r"a\x0aforged  9   1",
        r"\x1b[2J         22",
    ]
