from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from visualtokens.explain import Layer
from visualtokens.explain.render import (
    DIMMED,
    MAX_LAYERS,
    clip_peaks,
    colour_stops,
    data_uri,
    draw_borders,
    draw_mosaic,
    drawn_layers,
    format_change,
    frame_crop,
    overlay,
    place,
    place_labels,
    resize_for_display,
    scale_box,
)

from .stubs import explanation, slow_upsample

# Deuteranopia and protanopia, from Machado, Oliveira and Fernandes (2009), severity 1, linear RGB.
DEUTAN = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
PROTAN = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]


@pytest.mark.parametrize(("grid", "size"), [((1, 1), (5, 4)), ((2, 3), (9, 8)), ((4, 6), (3, 5))])
def test_placed_heat_is_the_upsampling_of_the_mask(grid: tuple[int, int], size: tuple[int, int]) -> None:
    heat = np.random.default_rng(0).random(grid, dtype=np.float32)
    width, height = size
    canvas, inside = place(heat, (0, 0, width, height), size)
    tensor = torch.tensor(heat)[None, None]
    tensor = F.interpolate(tensor, (height, width), mode="bilinear", align_corners=False)
    assert inside.all()
    assert np.allclose(canvas, tensor[0, 0], atol=1e-6)


def test_heat_is_placed_inside_a_crop() -> None:
    heat = np.random.default_rng(1).random((3, 4), dtype=np.float32)
    canvas, inside = place(heat, (5, 2, 17, 11), (20, 15))
    assert np.allclose(canvas[2:11, 5:17], slow_upsample(heat, 9, 12), atol=1e-6)
    assert inside[2:11, 5:17].all()
    assert inside.sum() == 9 * 12
    assert canvas[~inside].max() == 0


def test_a_pixel_is_inside_a_fractional_box_by_its_centre() -> None:
    _, inside = place(np.ones((1, 1), dtype=np.float32), (1.4, 0.6, 3.6, 2), (5, 3))
    assert inside.astype(int).tolist() == [[0, 0, 0, 0, 0], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0]]


def test_place_labels_against_a_loop() -> None:
    labels = np.arange(6).reshape(2, 3)
    left, top, right, bottom = box = (2.3, 1.0, 11.9, 8.6)
    got = place_labels(labels, box, (15, 10))
    for y in range(10):
        for x in range(15):
            cx, cy = x + 0.5, y + 0.5
            want = -2
            if left <= cx <= right and top <= cy <= bottom:
                want = labels[int((cy - top) / (bottom - top) * 2), int((cx - left) / (right - left) * 3)]
            assert got[y, x] == want


def test_scale_box() -> None:
    assert scale_box((1, 2, 3, 4), (10, 10), (20, 5)) == (2, 1, 6, 2)


def linear(rgb: np.ndarray) -> np.ndarray:
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("grey", [0, 90, 255])
@pytest.mark.parametrize(
    "vision", [np.eye(3), np.array(DEUTAN), np.array(PROTAN)], ids=["full", "deutan", "protan"]
)
def test_more_heat_is_lighter_for_all_colour_vision(grey: int, vision: np.ndarray) -> None:
    ramp = np.linspace(0, 1, 64, dtype=np.float32)[None]
    drawn = np.asarray(overlay(Image.new("RGB", (64, 1), (grey,) * 3), ramp)) / 255  # (1, 64, 3)
    lightness = linear(drawn[0]) @ vision.T @ [0.2126, 0.7152, 0.0722]
    assert np.diff(lightness).min() > -0.004  # rounding to 8 bits
    assert lightness[-1] - lightness[0] > 0.1
    assert (np.diff(lightness[::8]) > 0).all()


def test_the_image_stays_visible_below_the_heat() -> None:
    photo = Image.fromarray(np.array([[0, 255]], dtype=np.uint8)).convert("RGB")
    for value in (0.0, 0.5, 1.0):
        drawn = np.asarray(overlay(photo, np.full((1, 1), value, dtype=np.float32))).astype(int)
        assert (drawn[0, 1] - drawn[0, 0]).min() > 80


def test_a_pixel_is_40_percent_image_and_60_percent_heat() -> None:
    hottest = np.array(list(bytes.fromhex(colour_stops()[-1][1:])))
    drawn = np.asarray(overlay(Image.new("RGB", (1, 1), "white"), np.ones((1, 1), dtype=np.float32)))
    assert np.abs(drawn[0, 0] - (0.4 * 255 + 0.6 * hottest)).max() <= 0.5 + 0.3  # two roundings


def test_one_patch_does_not_darken_the_others() -> None:
    heat = np.zeros((20, 20), dtype=np.float32)
    heat[:10] = 0.02
    heat[3, 4] = 1.0
    clipped = clip_peaks(heat)
    assert (clipped[:10] == 1).all()
    assert (clipped[10:] == 0).all()
    single = np.eye(1, 400, dtype=np.float32).reshape(20, 20)
    assert (clip_peaks(single) == single).all()


def test_pixels_outside_the_crop_are_dimmed_and_without_heat() -> None:
    photo = Image.new("RGB", (10, 4), (200, 200, 200))
    drawn = np.asarray(overlay(photo, np.ones((2, 2), dtype=np.float32), box=(3, 0, 7, 4)))
    assert (drawn[:, :3] == 70).all()
    assert (drawn[:, 7:] == 70).all()
    assert drawn[:, 3:7].min() > 150


@pytest.mark.parametrize("grey", [0, 120, 255])
def test_borders_are_drawn_between_tokens_only(grey: int) -> None:
    photo = Image.new("RGB", (40, 20), (grey,) * 3)
    drawn = np.asarray(draw_borders(photo, np.array([[0, 1], [0, 1]]), box=(0, 0, 40, 20)))
    assert (drawn[:, 19] == 255).all()  # the last column of the left token
    assert (drawn[:, [18, 20]] < 64).all()  # dark on either side
    assert (drawn[:, :18] == grey).all()
    assert (drawn[:, 21:] == grey).all()


def test_borders_around_one_token() -> None:
    photo = Image.new("RGB", (40, 40), "grey")
    drawn = np.asarray(draw_borders(photo, np.arange(16).reshape(4, 4), box=(0, 0, 40, 40), token=5))
    rows, columns = np.nonzero((drawn == 255).all(2))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (9, 19, 9, 19)


def test_the_edge_of_the_crop_is_no_border() -> None:
    photo = Image.new("RGB", (40, 20), (100, 120, 140))
    drawn = np.asarray(draw_borders(photo, np.zeros((2, 2), dtype=int), box=(10, 0, 30, 20)))
    assert (drawn == (100, 120, 140)).all()


def test_mosaic_against_a_loop() -> None:
    """Two tokens, one of them with separate patches, and a dropped patch."""
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    assignment = np.array([[0, 1, 0], [1, 1, -1]])
    drawn = np.asarray(draw_mosaic(Image.fromarray(pixels), assignment, box=(0, 0, 30, 20)))
    for row, column in ((0, 0), (0, 2), (1, 1)):
        token = assignment[row, column]
        own = [pixels[y, x] for y in range(20) for x in range(30) if assignment[y // 10, x // 10] == token]
        assert np.abs(drawn[row * 10 + 5, column * 10 + 5] - np.mean(own, axis=0)).max() <= 0.5
    assert np.abs(drawn[15, 25] - DIMMED * pixels[15, 25].mean()).max() <= 1


def test_the_crop_is_framed() -> None:
    photo = Image.new("RGB", (40, 20), (100, 150, 200))
    assert frame_crop(photo, (0, 0, 40, 20)) is photo
    drawn = np.asarray(frame_crop(photo, (10, 0, 30, 20)))
    assert drawn[10, 20].tolist() == [100, 150, 200]
    assert drawn[10, 5].tolist() == [35, 52, 70]
    assert drawn[10, 10].tolist() == drawn[10, 29].tolist() == [255, 255, 255]
    assert frame_crop(photo, (5, -10, 35, 30)).size == (40, 20)  # padded beyond the image


def test_small_images_keep_their_pixels_and_large_ones_shrink() -> None:
    small = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).convert("RGB")
    shown, box = resize_for_display(small, (0, 0, 8, 4), side=100)
    assert np.array_equal(np.asarray(shown), np.kron(np.asarray(small), np.ones((12, 12, 1), dtype=np.uint8)))
    assert box == (0, 0, 96, 48)
    shown, box = resize_for_display(Image.new("RGB", (1600, 400)), (600, 0, 1000, 400), side=400)
    assert shown.size == (400, 100)
    assert box == (150, 0, 250, 100)


def test_a_long_image_is_cut_to_the_part_around_the_crop() -> None:
    pixels = np.tile(np.arange(200, dtype=np.uint8)[:, None, None], (1, 10, 3))  # a grey value per row
    shown, box = resize_for_display(Image.fromarray(pixels), (0, 150, 10, 160), side=80)
    assert shown.size == (20, 80)  # 10×40 of the 10×200 pixels, enlarged twice
    assert box == (0, 30, 20, 50)
    assert np.asarray(shown)[30, 0, 0] == 150  # the first row of the crop
    end, box = resize_for_display(Image.fromarray(pixels), (0, 190, 10, 200), side=80)
    assert (end.size, box) == ((20, 80), (0, 60, 20, 80))


def test_data_uri_holds_the_image() -> None:
    head, body = data_uri(Image.new("RGB", (6, 4), (10, 200, 30))).split(",")
    assert head == "data:image/jpeg;base64"
    decoded = Image.open(io.BytesIO(base64.b64decode(body)))
    assert decoded.size == (6, 4)
    assert np.abs(np.asarray(decoded).astype(int) - [10, 200, 30]).max() < 6


def test_many_layers_are_subsampled() -> None:
    layers = tuple(Layer(f"blocks.{i}.tap", "hard", 4, np.zeros((2, 2), dtype=int)) for i in range(40))
    shown = [layer.name for layer in drawn_layers(explanation(layers=layers))]
    assert len(shown) == MAX_LAYERS
    assert (shown[0], shown[-1]) == ("blocks.0.tap", "blocks.39.tap")


@pytest.mark.parametrize(("importance", "text"), [(0.42, "−0.42"), (-0.05, "+0.05"), (-0.004, "0.00")])
def test_format_change(importance: float, text: str) -> None:
    assert format_change(explanation(values=np.array([importance])), 0) == text
