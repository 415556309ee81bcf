"""What the numbers and colours in masks mean, with mapping and ignored ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from visualtokens.data import mask_classes
from visualtokens.data.decode import BadAnnotation
from visualtokens.data.mask_classes import Label, Legend, create_legend, parse_colour, parse_number, ranges
from visualtokens.errors import UserError

STREET = [Label("road", 0), Label("car", 1), Label("truck", 2), Label("sky", 3)]
COLOURED = [label._replace(colour=(40 * i, 7, 200)) for i, label in enumerate(STREET)]


def classes_of(legend: Legend, values: Any) -> Any:
    return legend.to_mask(np.array(values), path="m.png", image_id="m").tolist()


def test_every_number_of_a_mask_is_mapped_to_its_class() -> None:
    legend = create_legend([Label("a", 1), Label("b", 2), Label("c", 7)], ignored=(0, 255))
    values = np.array([[0, 1, 2], [255, 7, 0]], np.uint8)
    mask = legend.to_mask(values, path="m.png", image_id="m")
    assert mask.dtype == np.uint8
    assert mask.tolist() == [[255, 0, 1], [255, 2, 255]]
    assert (legend.classes, legend.colours, legend.in_colour) == (["a", "b", "c"], None, False)


@pytest.mark.parametrize("number", [9, 300, -5, 70_000])
def test_an_invalid_number_is_reported_with_its_position(number: int) -> None:
    values = np.zeros((3, 4), np.int32)
    values[1, 3] = values[2, 0] = number
    with pytest.raises(BadAnnotation) as caught:
        create_legend(STREET[:3]).to_mask(values, path="m.png", image_id="m")
    assert caught.value.field == "pixels"
    held = f"{number}, 0" if number < 0 else f"0, {number}"
    assert caught.value.why == (
        f"the mask holds {held}, but {number} has no class (2 pixels, the first at row 1, column 3); "
        "expected 0 road, 1 car, 2 truck and, ignored, 255"
        + (f"; add {number} to --data_args.ignore or --data_args.mapping" if 0 <= number < 2**16 else "")
    )


def test_messages_stay_short_with_many_classes_and_numbers() -> None:
    legend = create_legend(
        [Label("a\nb" * 20, 2 * i) for i in range(1)] + [Label(f"c{i}", 2 * i) for i in range(1, 99)]
    )
    with pytest.raises(BadAnnotation) as caught:
        classes_of(legend, [list(range(200))])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@given(st.lists(st.integers(0, 0xFFFFFF), min_size=1, max_size=40, unique=True), st.integers(0, 2**32 - 1))
def test_colours_equal_a_dictionary(codes: list[int], seed: int) -> None:
    """The sorted search returns what looking up every pixel does."""
    labels = [Label(str(i), i, (c >> 16, c >> 8 & 255, c & 255)) for i, c in enumerate(codes)]
    legend = create_legend(labels, in_colour=True)
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, len(labels), (5, 7))
    pixels = np.array([label.colour for label in labels], np.uint8)[numbers]
    assert classes_of(legend, pixels) == numbers.tolist()
    other = int(rng.integers(0, 2**24))
    pixels[2, 3] = other >> 16, other >> 8 & 255, other & 255
    if other in codes:
        assert classes_of(legend, pixels)[2][3] == codes.index(other)
    else:
        with pytest.raises(BadAnnotation, match=r"has no class \(1 pixel, the first at row 2, column 3\)"):
            classes_of(legend, pixels)


def test_strips_of_a_mask_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    legend = create_legend(COLOURED, in_colour=True)
    numbers = np.random.default_rng(0).integers(0, 4, (23, 5))
    pixels = np.array(legend.colours, np.uint8)[numbers]
    monkeypatch.setattr(mask_classes, "STRIP", 4)
    assert classes_of(legend, pixels) == numbers.tolist()


# Mapping and ignoring.


def test_names_are_merged_in_the_order_of_the_labels() -> None:
    legend = create_legend(COLOURED, in_colour=True, mapping={"truck": "vehicle", "car": "vehicle"})
    assert legend.classes == ["road", "vehicle", "sky"]
    assert legend.colours == [(0, 7, 200), (40, 7, 200), (120, 7, 200)]
    assert classes_of(legend, [[0, 1, 2, 3]]) == [[0, 1, 1, 2]]
    into = create_legend(COLOURED, mapping={"car": "truck"})
    assert into.classes == ["road", "truck", "sky"]
    assert into.colours is not None
    assert into.colours[1] == (80, 7, 200)  # that of the class of this name


def test_numbers_are_mapped_completely() -> None:
    legend = create_legend(STREET[:2], mapping={"7": "road", 26: "car", 8: "road"}, ignored=range(34))
    assert legend.classes == ["road", "car"]
    assert classes_of(legend, [[7, 8, 26, 0]]) == [[0, 0, 1, 255]]
    with pytest.raises(BadAnnotation, match="but 34 has no class"):
        classes_of(legend, [[7, 34]])
    assert create_legend(None, mapping={3: "b", 1: "a"}).classes == ["b", "a"]


def test_255_is_ignored_unless_it_has_a_class() -> None:
    assert classes_of(create_legend(STREET), [[0, 255]]) == [[0, 255]]
    assert classes_of(create_legend(None, mapping={0: "a", 255: "b"}), [[0, 255]]) == [[0, 1]]


@pytest.mark.parametrize(
    ("ignore", "expected"),
    [
        ("truck", [[0, 1, 255, 2]]),
        (2, [[0, 1, 255, 2]]),
        ("2", [[0, 1, 255, 2]]),
        (["truck", "road"], [[255, 0, 255, 1]]),
        ([[80, 7, 200]], [[0, 1, 255, 2]]),
        ("#5007c8", [[0, 1, 255, 2]]),
        ("80,7,200", [[0, 1, 255, 2]]),
        ((), [[0, 1, 2, 3]]),
    ],
)
def test_ignored_classes_are_left_out(ignore: Any, expected: list[list[int]]) -> None:
    legend = create_legend(COLOURED, in_colour=True, ignore=ignore)
    assert classes_of(legend, [[0, 1, 2, 3]]) == expected
    assert classes_of(legend, [[label.colour for label in COLOURED]]) == expected
    assert len(legend.classes) == max(c for c in expected[0] if c != 255) + 1


def test_a_class_may_be_ignored_under_its_old_and_its_new_name() -> None:
    for ignore in ("vehicle", ["car", "truck"]):
        legend = create_legend(STREET, mapping={"car": "vehicle", "truck": "vehicle"}, ignore=ignore)
        assert legend.classes == ["road", "sky"]
        assert classes_of(legend, [[0, 1, 2, 3]]) == [[0, 255, 255, 1]]


def test_ignored_colours_need_no_class() -> None:
    legend = create_legend(COLOURED, in_colour=True, ignore="1,2,3")
    assert classes_of(legend, [[(1, 2, 3), (0, 7, 200)]]) == [[255, 0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mapping": "car"}, "mapping='car' must give classes by name, such as {truck: vehicle"),
        ({"mapping": {}}, "mapping={} must give classes"),
        (
            {"mapping": {"car": None}},
            "None of 'car' is not the name of a class; to leave it out, add 'car' to --data_args.ignore",
        ),
        ({"mapping": {"cra": "x"}}, "unknown class in mapping 'cra'; did you mean 'car'?"),
        ({"mapping": {70_000: "car"}}, "unknown class in mapping '70000'"),
        ({"mapping": {"car": "x", 2: "x"}}, "mixes names and numbers"),
        ({"mapping": {0: "road", 1: "cra"}}, "unknown class in mapping 'cra'; did you mean 'car'?"),
        ({"mapping": {3: "car"}}, "has no number for 'road', 'truck', 'sky'; give the class of every number"),
        ({"labels": None, "mapping": {"a": "b"}}, "mapping names 'a', but no class has this name"),
        ({"ignore": "cra"}, "unknown class in ignore 'cra'; did you mean 'car'?"),
        ({"ignore": -1}, "-1 is not a number from 0 to 65535, the name of a class or a colour, which"),
        ({"ignore": [1.5]}, "1.5 is not a number from 0"),
        ({"ignore": True}, "True is not a number"),
        ({"ignore": None}, "or a colour, which is written 128,64,128 because # begins a comment"),
        ({"ignore": {"a": 1}}, "is not a number"),
        ({"ignore": "1,2,3"}, "'1,2,3' is a colour, but the classes have none"),
        ({"ignore": ["road", "car", "truck", "sky"]}, "the masks have 0 classes; give from 1 to 255"),
        ({"labels": [Label(str(i), i) for i in range(256)]}, "the masks have 256 classes"),
        ({"labels": [*COLOURED, Label("bus", 4)], "in_colour": True}, "the class 'bus' has no colour"),
        (
            {"labels": [*COLOURED, Label("bus", 4, (40, 7, 200))], "in_colour": True},
            "the class 'car' and 'bus' have the same colour, 40,7,200; change one",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        create_legend(**{"labels": STREET} | options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_labels_of_one_class_may_share_a_colour() -> None:
    labels = [*COLOURED, Label("bus", 4, (40, 7, 200))]
    assert create_legend(labels, in_colour=True, mapping={"bus": "car"}).classes == [
        "road",
        "car",
        "truck",
        "sky",
    ]


# Parts of messages and options.


def test_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0 to 2, 5, 7 to 8"
    assert ranges(range(0, 60, 2)).endswith("20, 22, …")


@pytest.mark.parametrize(
    ("value", "colour"),
    [
        ("128,64,0", (128, 64, 0)),
        ("128 64 0", (128, 64, 0)),
        ("[128, 64, 0]", (128, 64, 0)),
        ("#804000", (128, 64, 0)),
        ([128, 64, 0], (128, 64, 0)),
        *((wrong, None) for wrong in ("1,2", "1,2,300", "#80400", "red", [1, 2], [1, 2, 3, 4], [1, 2, 256])),
        *((wrong, None) for wrong in (None, 5, True, [1, 2, True], [1, 2, "3"], [1.0, 2.0, 3.0], {})),
    ],
)
def test_colours_of_options(value: Any, colour: Any) -> None:
    assert parse_colour(value) == colour


def test_numbers_of_options() -> None:
    assert [parse_number(value) for value in (0, "7", " 65535 ", 65_535)] == [0, 7, 65_535, 65_535]
    assert {parse_number(value) for value in (-1, "-1", 65_536, "9" * 5000, True, 1.0, None, "", "a")} == {
        None
    }
