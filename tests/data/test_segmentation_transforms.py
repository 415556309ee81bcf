"""Image and mask change together, and only as asked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from visualtokens.data.segmentation_transforms import (
    SEGMENT_PRESETS,
    SegmentAugment,
    SegmentPreprocess,
    as_segment_augment,
)
from visualtokens.errors import UserError

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def preprocess(*size: int, **options: object) -> SegmentPreprocess:
    return SegmentPreprocess((size[0], size[-1]), MEAN, STD, **options)  # type: ignore[arg-type]


def marked(height: int, width: int) -> tuple[Image.Image, np.ndarray]:
    """Blocks of 8×8 in colours, and a mask that repeats them: class = red // 16."""
    blocks = np.random.default_rng(1).integers(0, 15, (-(-height // 8), -(-width // 8)), dtype=np.uint8)
    mask = np.kron(blocks, np.ones((8, 8), np.uint8))[:height, :width]
    pixels = np.stack([mask * 16, 200 - mask, np.full_like(mask, 90)], axis=2)
    return Image.fromarray(pixels), mask


@pytest.mark.parametrize(
    ("width", "height", "seen"),
    [(200, 100, (64, 128)), (100, 200, (128, 64)), (64, 64, (64, 64)), (10, 10, (64, 64))],
)
def test_short_side_is_the_model_s(width: int, height: int, seen: tuple[int, int]) -> None:
    assert preprocess(64).seen_size(width, height) == seen


def test_one_pixel_and_two_thousand_pixels() -> None:
    small = preprocess(64)
    assert small.seen_size(1, 1) == (64, 64)
    assert small.seen_size(2000, 1) == (1, 256)  # the long side is at most four times as long
    assert small.seen_size(1, 2000) == (256, 1)
    assert preprocess(64, longest=100).seen_size(300, 100) == (33, 100)
    for size in ((1, 1), (2000, 1), (2000, 2000)):
        x = small(Image.new("RGB", size, "white"))
        assert x.shape == (3, *small.seen_size(*size))
        torch.testing.assert_close(x[:, 0, 0], (1 - torch.tensor(MEAN)) / torch.tensor(STD))


def test_stretched_to_the_size() -> None:
    stretch = preprocess(30, 50, keep_ratio=False)
    assert stretch.seen_size(7, 900) == (30, 50)
    assert stretch(Image.new("RGB", (7, 9))).shape == (3, 30, 50)


def test_without_changes_the_crop_is_the_image() -> None:
    image, mask = marked(64, 64)
    pixels, truth = SegmentAugment()(image, mask, preprocess(64), np.random.default_rng(0), mirror=range(15))
    assert pixels.dtype == truth.dtype == torch.uint8
    assert type(pixels) is type(truth) is torch.Tensor
    assert torch.equal(pixels, torch.from_numpy(np.array(image)).permute(2, 0, 1))
    assert torch.equal(truth, torch.from_numpy(mask))


def test_image_and_mask_stay_together() -> None:
    """Enlarged, cropped and flipped at random, the colour of a pixel still tells its class."""
    image, mask = marked(64, 96)
    augment = SegmentAugment(scale=(1.0, 3.0), flip=0.5)
    for seed in range(20):
        pixels, truth = augment(image, mask, preprocess(64), np.random.default_rng(seed), mirror=range(15))
        assert pixels.shape == (3, 64, 64)
        agree = (pixels[0].float() / 16).round() == truth
        assert agree.float().mean() > 0.7  # all but the smooth edges of the blocks
        assert len(truth.unique()) > 3


def test_what_the_image_does_not_reach_is_ignored() -> None:
    image, mask = marked(64, 64)
    half = SegmentAugment(scale=(0.5, 0.5))
    pixels, truth = half(image, mask, preprocess(64), np.random.default_rng(0), mirror=range(15))
    assert (truth != 255).nonzero().amax(0).tolist() == [31, 31]
    assert (truth[:32, :32] != 255).all()
    assert pixels[:, -1, -1].tolist() == [round(255 * m) for m in MEAN]


def test_a_mirror_changes_left_into_right() -> None:
    image, mask = marked(32, 32)
    mirror = [1, 0, *range(2, 15)]
    flip = SegmentAugment(flip=1.0)
    pixels, truth = flip(image, mask, preprocess(32), np.random.default_rng(0), mirror=mirror)
    expected = np.array([*mirror], np.uint8)[mask[:, ::-1]]
    assert truth.tolist() == expected.tolist()
    assert torch.equal(pixels.flip(2), torch.from_numpy(np.array(image)).permute(2, 0, 1))
    mask[:] = 255
    assert flip(image, mask, preprocess(32), np.random.default_rng(0), mirror=mirror)[1].unique() == 255


def test_colours_change_and_classes_do_not() -> None:
    image, mask = marked(32, 32)
    jitter = SegmentAugment(brightness=0.5, contrast=0.5, saturation=0.5, hue=0.3)
    pixels, truth = jitter(image, mask, preprocess(32), np.random.default_rng(0), mirror=range(15))
    assert truth.tolist() == mask.tolist()
    assert not torch.equal(pixels, torch.from_numpy(np.array(image)).permute(2, 0, 1))


@pytest.mark.parametrize("preset", SEGMENT_PRESETS)
@pytest.mark.parametrize("size", [(1, 1), (1, 2000), (40, 30)])
def test_every_preset_takes_any_image(preset: str, size: tuple[int, int]) -> None:
    image, mask = Image.new("RGB", size), np.zeros((size[1], size[0]), np.uint8)
    augment = as_segment_augment(preset)
    first = augment(image, mask, preprocess(48, 64), np.random.default_rng(5), mirror=[0])
    again = augment(image, mask, preprocess(48, 64), np.random.default_rng(5), mirror=[0])
    assert first[0].shape == (3, 48, 64)
    assert first[1].shape == (48, 64)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_digits_are_never_mirrored() -> None:
    assert SEGMENT_PRESETS["digits"].flip == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(scale=(2.0, 1.0)), r"scale=\(2.0, 1.0\) is not a range"),
        (dict(flip=1.5), "flip=1.5 is not between 0 and 1"),
        (dict(hue=0.6), "hue=0.6 is not between 0 and 0.5"),
    ],
)
def test_wrong_options(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        SegmentAugment(**options)


def test_wrong_preprocessing_and_presets() -> None:
    with pytest.raises(UserError, match="size="):
        preprocess(0)
    with pytest.raises(UserError, match="std above 0"):
        SegmentPreprocess((1, 1), MEAN, (0, 1, 1))
    with pytest.raises(UserError, match="longest=10 is less than the short side, 64"):
        preprocess(64, longest=10)
    with pytest.raises(UserError, match="unknown augmentation 'phot'; did you mean 'photo'"):
        as_segment_augment("phot")
