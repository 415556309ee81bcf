"""Colours and pictures of detections."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from PIL import Image

from visualtokens.tasks.detect.detections import (
    RGB,
    SHADES,
    Detections,
    draw,
    object_colours,
    text_colour,
    truth,
)

EVERY_LABEL = range(90)


def lab(colour: RGB) -> np.ndarray:
    """CIE L*a*b*, in which a distance of about 2 can just be seen; from the definition."""
    encoded = np.array(colour) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ linear / (0.9505, 1, 1.089))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(a: RGB, b: RGB) -> float:
    """WCAG 2's ratio, from 1 to 21."""
    luminances = sorted(((lab(colour)[0] + 16) / 116) ** 3 for colour in (a, b))
    return (luminances[1] + 0.05) / (luminances[0] + 0.05)


@pytest.mark.parametrize("label", EVERY_LABEL)
def test_objects_of_a_class_differ_and_none_is_dark(label: int) -> None:
    colours = object_colours([label] * len(SHADES))
    assert min(np.linalg.norm(lab(a) - lab(b)) for a, b in itertools.combinations(colours, 2)) > 15
    assert min(lab(colour)[0] for colour in colours) > 40
    for colour in colours:
        text = {"black": (0, 0, 0), "white": (255, 255, 255)}[text_colour(colour)]
        assert contrast(colour, text) > 4.5


def test_objects_of_a_class_have_similar_hues() -> None:
    for label in EVERY_LABEL:
        angles = [np.arctan2(*lab(colour)[:0:-1]) for colour in object_colours([label] * len(SHADES))]
        distances = [abs((a - b + np.pi) % (2 * np.pi) - np.pi) for a in angles for b in angles]
        assert max(distances) < 1.5  # a quarter of the circle


def test_shades_are_counted_per_class() -> None:
    assert object_colours([3, 5, 3]) == [*object_colours([3, 5]), object_colours([3, 3])[1]]
    many = object_colours([0] * (len(SHADES) + 1))
    assert many[0] == many[-1]


def test_masks_of_two_objects_of_one_class_have_two_colours() -> None:
    masks = torch.zeros(2, 20, 20, dtype=torch.bool)
    masks[0, 2:8, 2:8] = masks[1, 12:18, 12:18] = True
    boxes = torch.tensor([[2.0, 2, 8, 8], [12.0, 12, 18, 18]])
    picture = np.asarray(draw(Image.new("RGB", (20, 20)), truth(boxes, torch.zeros(2).long(), masks), ["a"]))
    assert picture.shape == (480, 480, 3)
    first, second = picture[120, 120], picture[360, 360]
    for pixel, colour in zip((first, second), object_colours([0, 0]), strict=True):
        assert np.abs(pixel - 0.45 * np.array(colour)).max() <= 1


def one(box: list[float], size: tuple[int, int], *, masks: bool = True) -> Detections:
    mask = torch.zeros(1, *size, dtype=torch.bool)
    left, top, right, bottom = map(int, box)
    mask[0, top:bottom, left:right] = True
    return Detections(torch.tensor([box]), torch.tensor([0]), torch.tensor([0.9]), mask if masks else None)


def test_only_the_mask_is_tinted() -> None:
    image = Image.new("RGB", (600, 500), (100, 100, 100))
    picture = np.asarray(draw(image, one([200.0, 100.0, 400.0, 300.0], (500, 600)), ["cat"]))
    assert picture.shape == (500, 600, 3)
    inside, outside = picture[200, 300].astype(int), picture[450, 550]
    assert outside.tolist() == [100, 100, 100]
    assert np.abs(inside - (0.55 * 100 + 0.45 * np.array(object_colours([0])[0]))).max() <= 1


@pytest.mark.parametrize("size", [(1, 1), (128, 128), (1, 40)])
def test_small_pictures_are_enlarged(size: tuple[int, int]) -> None:
    image = Image.new("RGB", (size[1], size[0]))
    picture = draw(image, one([0.0, 0.0, float(size[1]), float(size[0])], size), ["a class with a long name"])
    assert min(picture.size) >= 480
    assert picture.width * size[0] == picture.height * size[1]


def test_no_detection_leaves_the_picture_unchanged() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (500, 600, 3), np.uint8))
    nothing = one([0.0, 0.0, 9.0, 9.0], (500, 600)).above(1.0)
    assert np.array_equal(np.asarray(draw(image, nothing, ["cat"])), np.asarray(image))


def test_box_outside_the_picture_can_be_drawn() -> None:
    draw(Image.new("RGB", (500, 500)), one([450.0, 450.0, 900.0, 900.0], (500, 500), masks=False), ["cat"])


def test_size_and_scores_of_the_picture() -> None:
    image = Image.new("RGB", (100, 200), "white")
    objects = truth(torch.tensor([[10.0, 50, 60, 90]]), torch.tensor([0]), None)
    plain = draw(image, objects, ["a"], scores=False, min_side=1)
    assert plain.size == image.size
    assert np.asarray(plain)[70, 35].tolist() == [255, 255, 255]  # the inside of a box without a mask
    assert np.any(np.asarray(plain) != np.asarray(draw(image, objects, ["a"], min_side=1)))
