from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from visualtokens.explain.render import change, colour_stops, data_uri, for_display, framed, overlay

from .stubs import explanation

# Deuteranopia and protanopia, from Machado, Oliveira and Fernandes 2009, severity 1, linear RGB.
DEUTAN = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
PROTAN = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]


def linear(rgb: np.ndarray) -> np.ndarray:
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("grey", [0, 90, 255])
@pytest.mark.parametrize(
    "eye", [np.eye(3), np.array(DEUTAN), np.array(PROTAN)], ids=["full", "deutan", "protan"]
)
def test_heat_only_ever_lightens_whatever_the_photo_and_the_eye(grey: int, eye: np.ndarray) -> None:
    ramp = np.linspace(0, 1, 64, dtype=np.float32)[None]
    drawn = np.asarray(overlay(Image.new("RGB", (64, 1), (grey,) * 3), ramp)) / 255  # (1, 64, 3)
    lightness = linear(drawn[0]) @ eye.T @ [0.2126, 0.7152, 0.0722]
    assert np.diff(lightness).min() > -0.004  # within the rounding to 8 bits
    assert lightness[-1] - lightness[0] > 0.1
    assert (np.diff(lightness[::8]) > 0).all()


def test_the_photo_stays_visible_under_the_heat() -> None:
    photo = Image.fromarray(np.array([[0, 255]], dtype=np.uint8)).convert("RGB")
    for value in (0.0, 0.5, 1.0):
        drawn = np.asarray(overlay(photo, np.full((1, 1), value, dtype=np.float32))).astype(int)
        assert (drawn[0, 1] - drawn[0, 0]).min() > 80


def test_a_pixel_is_two_fifths_photo_and_three_fifths_heat() -> None:
    hottest = np.array(list(bytes.fromhex(colour_stops()[-1][1:])))
    drawn = np.asarray(overlay(Image.new("RGB", (1, 1), "white"), np.ones((1, 1), dtype=np.float32)))
    assert np.abs(drawn[0, 0] - (0.4 * 255 + 0.6 * hottest)).max() <= 0.5 + 0.3  # two roundings


def test_outside_the_crop_is_dimmed_and_without_heat() -> None:
    photo = Image.new("RGB", (10, 4), (200, 200, 200))
    drawn = np.asarray(overlay(photo, np.ones((2, 2), dtype=np.float32), box=(3, 0, 7, 4)))
    assert (drawn[:, :3] == 70).all()
    assert (drawn[:, 7:] == 70).all()
    assert drawn[:, 3:7].min() > 150


def test_of_a_strip_the_part_around_the_crop_is_drawn() -> None:
    pixels = np.tile(np.arange(200, dtype=np.uint8)[:, None, None], (1, 10, 3))  # rows of their own grey
    shown, box = for_display(Image.fromarray(pixels), (0, 150, 10, 160), side=80)
    assert shown.size == (20, 80)  # 10×40 of the 10×200 pixels, twice as large
    assert box == (0, 30, 20, 50)
    assert np.asarray(shown)[30, 0, 0] == 150  # the crop begins where the box says
    end, box = for_display(Image.fromarray(pixels), (0, 190, 10, 200), side=80)
    assert (end.size, box) == ((20, 80), (0, 60, 20, 80))


def test_the_original_is_framed_where_it_is_cropped_and_untouched_where_not() -> None:
    photo = Image.new("RGB", (40, 20), (100, 150, 200))
    assert framed(photo, (0, 0, 40, 20)) is photo
    drawn = np.asarray(framed(photo, (10, 0, 30, 20)))
    assert drawn[10, 20].tolist() == [100, 150, 200]
    assert drawn[10, 5].tolist() == [35, 52, 70]
    assert drawn[10, 10].tolist() == drawn[10, 29].tolist() == [255, 255, 255]


def test_a_box_that_is_padded_beyond_the_image_is_drawn_within_it() -> None:
    drawn = framed(Image.new("RGB", (40, 20), "gray"), (5, -10, 35, 30))
    assert drawn.size == (40, 20)


def test_tiny_images_keep_their_pixels_and_large_ones_shrink() -> None:
    tiny = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).convert("RGB")
    shown, box = for_display(tiny, (0, 0, 8, 4), side=100)
    assert np.array_equal(np.asarray(shown), np.kron(np.asarray(tiny), np.ones((12, 12, 1), dtype=np.uint8)))
    assert box == (0, 0, 96, 48)
    shown, box = for_display(Image.new("RGB", (4000, 1000)), (1500, 0, 2500, 1000), side=400)
    assert shown.size == (400, 100)
    assert box == (150, 0, 250, 100)
    assert for_display(Image.new("RGB", (5000, 1)), (0, 0, 5000, 1), side=100)[0].size == (
        100,
        25,
    )  # a strip is drawn around its crop


@pytest.mark.parametrize(
    ("value", "text"), [(0.42, "−0.42"), (-0.05, "+0.05"), (0.004, "0.00"), (-0.004, "0.00")]
)
def test_change_is_what_happens_to_the_probability(value: float, text: str) -> None:
    assert change(explanation(importance=np.array([value])), 0) == text


def test_colour_stops_run_from_dark_to_light() -> None:
    first, *_, last = colour_stops()
    assert sum(bytes.fromhex(first[1:])) < 30
    assert sum(bytes.fromhex(last[1:])) > 600


def test_data_uri_holds_the_picture() -> None:
    head, body = data_uri(Image.new("RGB", (6, 4), (10, 200, 30))).split(",")
    assert head == "data:image/jpeg;base64"
    back = Image.open(io.BytesIO(base64.b64decode(body)))
    assert back.size == (6, 4)
    assert np.abs(np.asarray(back).astype(int) - [10, 200, 30]).max() < 6
