from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from visualtokens.data import PRESETS, Augment, Preprocess
from visualtokens.data.transforms import as_augment
from visualtokens.errors import UserError

PLAIN = Preprocess((32, 32), (0, 0, 0), (1, 1, 1))


def noise(width: int = 32, height: int = 32) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def apply(augment: Augment, image: Image.Image, seed: int = 0, preprocess: Preprocess = PLAIN) -> np.ndarray:
    return np.asarray(augment(image, preprocess, np.random.default_rng(seed)))


def test_the_defaults_change_nothing() -> None:
    image, preprocess = noise(70, 50), Preprocess((24, 32), (0, 0, 0), (1, 1, 1), 0.9)
    expected = preprocess.resize(image, preprocess.crop_box(70, 50))
    np.testing.assert_array_equal(apply(Augment(), image, preprocess=preprocess), np.asarray(expected))
    assert PRESETS["none"] == Augment()


@pytest.mark.parametrize(
    "change",
    [
        {"crop_area": (0.5, 0.6)},
        {"flip": 1.0},
        {"rotate": 20.0},
        {"translate": 0.2},
        {"scale": (0.5, 0.7)},
        {"brightness": 0.5},
        {"contrast": 0.5},
        {"saturation": 0.5},
        {"hue": 0.3},
    ],
)
def test_every_option_has_an_effect_that_its_generator_decides(change: dict) -> None:
    augment, image = Augment(**change), noise()
    first = apply(augment, image, 1)
    assert (first != np.asarray(image)).any()
    np.testing.assert_array_equal(first, apply(augment, image, 1))
    if change != {"flip": 1.0}:
        assert (first != apply(augment, image, 2)).any()


def test_flip_is_a_mirror_and_as_frequent_as_asked() -> None:
    image = noise()
    np.testing.assert_array_equal(apply(Augment(flip=1.0), image), np.asarray(image)[:, ::-1])
    flips = sum((apply(Augment(flip=0.25), image, seed) != np.asarray(image)).any() for seed in range(400))
    assert 60 < flips < 140  # 100 ± 4.6 standard deviations


def test_digits_are_never_mirrored() -> None:
    assert Augment().flip == 0
    assert PRESETS["digits"].flip == 0
    assert PRESETS["photo"].flip > 0


def dot(x: int, y: int) -> Image.Image:
    image = Image.new("RGB", (33, 33))
    image.paste((255, 255, 255), (x - 1, y - 1, x + 2, y + 2))
    return image


def centre(pixels: np.ndarray) -> tuple[float, float]:
    weight = pixels[..., 0].astype(float)
    y, x = np.mgrid[: weight.shape[0], : weight.shape[1]]
    return (x * weight).sum() / weight.sum(), (y * weight).sum() / weight.sum()


def test_moves_stay_within_their_bounds() -> None:
    size33 = Preprocess((33, 33), (0, 0, 0), (1, 1, 1))
    shifts, angles, reaches = [], [], []
    for seed in range(100):
        x, y = centre(apply(Augment(translate=0.1), dot(16, 16), seed, size33))
        shifts += [x - 16, y - 16]
        x, y = centre(apply(Augment(rotate=15), dot(26, 16), seed, size33))
        angles.append(np.degrees(np.arctan2(y - 16, x - 16)))
        x, y = centre(apply(Augment(scale=(0.8, 1.2)), dot(26, 16), seed, size33))
        reaches.append((x - 16) / 10)
    for found, low, high in ((shifts, -3.3, 3.3), (angles, -15, 15), (reaches, 0.8, 1.2)):
        slack = 0.05 * (high - low)
        assert low - slack <= min(found) < low + 4 * slack
        assert high - 4 * slack < max(found) <= high + slack


def test_what_a_move_uncovers_is_black() -> None:
    white = Image.new("RGB", (32, 32), "white")
    moved = apply(Augment(scale=(0.5, 0.5)), white)
    assert moved[0, 0].tolist() == [0, 0, 0]
    assert moved[16, 16].tolist() == [255, 255, 255]


@given(
    size=st.tuples(st.integers(1, 64), st.integers(1, 64)),
    width=st.integers(1, 400),
    height=st.integers(1, 400),
    seed=st.integers(0, 2**32),
)
def test_random_crops_fit_and_have_the_area_asked_for(
    size: tuple[int, int], width: int, height: int, seed: int
) -> None:
    augment, preprocess = Augment(crop_area=(0.2, 0.5)), Preprocess(size, (0, 0, 0), (1, 1, 1))
    image = Image.new("RGB", (width, height))
    left, top, right, bottom = augment._box(image, preprocess, np.random.default_rng(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    stretch = (right - left) / (bottom - top) / (size[1] / size[0])
    assert 3 / 4 - 1e-6 <= stretch <= 4 / 3 + 1e-6
    share = (right - left) * (bottom - top) / (width * height)
    touches = right - left > width * 0.999 or bottom - top > height * 0.999
    assert share <= 0.5 + 1e-6
    assert share >= 0.2 - 1e-6 or touches
    assert augment(image, preprocess, np.random.default_rng(seed)).size == (size[1], size[0])


def test_brightness_keeps_to_its_range() -> None:
    grey = Image.new("RGB", (32, 32), (100, 100, 100))
    levels = [int(apply(Augment(brightness=0.2), grey, seed)[0, 0, 0]) for seed in range(100)]
    assert 80 <= min(levels) < 85
    assert 115 < max(levels) <= 120


def test_presets_by_name() -> None:
    assert as_augment("photo") is PRESETS["photo"]
    own = Augment(flip=0.1)
    assert as_augment(own) is own
    with pytest.raises(UserError, match="unknown augmentation 'digit'; did you mean 'digits'"):
        as_augment("digit")


@pytest.mark.parametrize(
    "change",
    [
        {"crop_area": (0.0, 1.0)},
        {"crop_area": (0.5, 1.5)},
        {"crop_area": (0.9, 0.5)},
        {"crop_stretch": (0.0, 1.0)},
        {"flip": 1.5},
        {"rotate": -3.0},
        {"translate": 1.5},
        {"scale": (1.2, 0.8)},
        {"hue": 0.6},
        {"saturation": 2.0},
    ],
)
def test_unusable_options(change: dict) -> None:
    (name,) = change
    with pytest.raises(UserError, match=f"{name}="):
        Augment(**change)


def test_options_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["none"].flip = 1.0  # type: ignore[misc]
