from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from visualtokens.data import Preprocess
from visualtokens.errors import UserError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_at_the_models_size_only_the_values_change() -> None:
    image = noise(7, 5)
    out = Preprocess((5, 7), MEAN, STD)(image)
    values = np.asarray(image) / 255
    expected = ((values - np.array(MEAN)) / np.array(STD)).transpose(2, 0, 1)
    assert (out.dtype, out.shape) == (torch.float32, (3, 5, 7))
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert out.is_contiguous()


@pytest.mark.parametrize(
    ("size", "crop", "original", "box"),
    [
        ((224, 224), 1.0, (400, 300), (50, 0, 350, 300)),
        ((224, 224), 0.5, (400, 300), (125, 75, 275, 225)),
        ((224, 224), 0.875, (256, 256), (16, 16, 240, 240)),
        ((100, 200), 1.0, (300, 300), (0, 75, 300, 225)),
        ((32, 32), 1.0, (8, 8), (0, 0, 8, 8)),
        ((200, 100), 1.0, (50, 400), (0, 150, 50, 250)),
    ],
)
def test_crop_box(size: tuple, crop: float, original: tuple, box: tuple) -> None:
    assert Preprocess(size, MEAN, STD, crop).crop_box(*original) == pytest.approx(box)


@given(
    size=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    width=st.integers(1, 3000),
    height=st.integers(1, 3000),
    crop=st.floats(0.01, 1.0),
)
def test_crop_box_is_centred_inside_and_in_shape(
    size: tuple[int, int], width: int, height: int, crop: float
) -> None:
    left, top, right, bottom = Preprocess(size, MEAN, STD, crop).crop_box(width, height)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    assert left + right == pytest.approx(width)
    assert top + bottom == pytest.approx(height)
    assert (right - left) / (bottom - top) == pytest.approx(size[1] / size[0])
    largest = max((right - left) / width, (bottom - top) / height)
    assert largest == pytest.approx(crop)


@pytest.mark.parametrize("crop", [1.0, 0.6])
def test_the_model_sees_what_the_crop_box_says(crop: float) -> None:
    """On an image whose red is x and whose green is y, the result says where each pixel came from."""
    width, height = 250, 200
    picture = np.zeros((height, width, 3), np.uint8)
    picture[..., 0] = np.arange(width)
    picture[..., 1] = np.arange(height)[:, None]
    preprocess = Preprocess((40, 30), (0, 0, 0), (1, 1, 1), crop)
    seen = preprocess(Image.fromarray(picture)) * 255
    left, top, right, bottom = preprocess.crop_box(width, height)
    x = left + (torch.arange(30) + 0.5) * (right - left) / 30 - 0.5
    y = top + (torch.arange(40) + 0.5) * (bottom - top) / 40 - 0.5
    inner = slice(2, -2)  # at the border of the image the filter has nothing to lean on
    torch.testing.assert_close(seen[0, inner, inner], x[inner].expand(36, -1), atol=0.51, rtol=0)
    torch.testing.assert_close(seen[1, inner, inner], y[inner, None].expand(-1, 26), atol=0.51, rtol=0)


def test_shrinking_is_smoothed() -> None:
    stripes = np.zeros((256, 256, 3), np.uint8)
    stripes[:, ::2] = 255
    out = Preprocess((32, 32), (0, 0, 0), (1, 1, 1))(Image.fromarray(stripes))
    assert (out - 0.5).abs()[:, 2:-2, 2:-2].max() < 0.02  # picking pixels would give 0 or 1


def test_other_modes_are_laid_on_white_first() -> None:
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    torch.testing.assert_close(Preprocess((8, 8), (0, 0, 0), (1, 1, 1))(clear), torch.ones(3, 8, 8))


def test_a_batch_is_normalised_like_its_images() -> None:
    preprocess = Preprocess((3, 5), MEAN, STD)
    values = torch.randint(0, 256, (4, 3, 5, 3), dtype=torch.uint8)
    each = torch.stack([preprocess.normalise(value) for value in values])
    assert torch.equal(preprocess.normalise(values), each)


@pytest.mark.parametrize(
    "options",
    [{"size": (0, 5)}, {"size": (5,)}, {"std": (1, 0, 1)}, {"mean": (0, 0)}, {"crop": 0}, {"crop": 1.1}],
)
def test_unusable_options(options: dict) -> None:
    (name,) = options
    with pytest.raises(UserError, match=f"{name}="):
        Preprocess(**{"size": (5, 5), "mean": MEAN, "std": STD} | options)
