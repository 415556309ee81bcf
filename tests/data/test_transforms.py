"""Preprocessing, augmentation, Mixup and CutMix against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data.auto_augment import AutoAugment, RandAugment

from visualtokens.data import PRESETS, Augment, Batch, Mix, Preprocess, generator
from visualtokens.data.base import seeded_globals
from visualtokens.data.transforms import as_augment, policy_transform
from visualtokens.errors import UserError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PLAIN = Preprocess((32, 32), (0.5, 0.25, 0.1), (1, 1, 1))


def noise(width: int = 32, height: int = 32) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_an_image_of_the_models_size_is_only_normalised() -> None:
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
        ((200, 100), 1.0, (50, 400), (0, 150, 50, 250)),
    ],
)
def test_crop_box(size: tuple, crop: float, original: tuple, box: tuple) -> None:
    assert Preprocess(size, MEAN, STD, crop).crop_box(*original) == pytest.approx(box)


@settings(max_examples=50)
@given(
    size=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    width=st.integers(1, 3000),
    height=st.integers(1, 3000),
    crop=st.floats(0.01, 1.0),
)
def test_the_crop_box_is_centred_and_has_the_models_aspect_ratio(
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
def test_the_model_sees_the_crop_box(crop: float) -> None:
    """Red is x and green is y in the image, so that the result shows where each pixel came from."""
    width, height = 250, 200
    picture = np.zeros((height, width, 3), np.uint8)
    picture[..., 0] = np.arange(width)
    picture[..., 1] = np.arange(height)[:, None]
    preprocess = Preprocess((40, 30), (0, 0, 0), (1, 1, 1), crop)
    seen = preprocess(Image.fromarray(picture)) * 255
    left, top, right, bottom = preprocess.crop_box(width, height)
    x = left + (torch.arange(30) + 0.5) * (right - left) / 30 - 0.5
    y = top + (torch.arange(40) + 0.5) * (bottom - top) / 40 - 0.5
    inner = slice(2, -2)  # at the border, the filter is truncated
    torch.testing.assert_close(seen[0, inner, inner], x[inner].expand(36, -1), atol=0.51, rtol=0)
    torch.testing.assert_close(seen[1, inner, inner], y[inner, None].expand(-1, 26), atol=0.51, rtol=0)


def test_downsampling_is_antialiased() -> None:
    stripes = np.zeros((256, 256, 3), np.uint8)
    stripes[:, ::2] = 255
    out = Preprocess((32, 32), (0, 0, 0), (1, 1, 1))(Image.fromarray(stripes))
    assert (out - 0.5).abs()[:, 2:-2, 2:-2].max() < 0.02  # nearest neighbours would be 0 or 1


def test_transparent_pixels_are_blended_with_white() -> None:
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    torch.testing.assert_close(Preprocess((8, 8), (0, 0, 0), (1, 1, 1))(clear), torch.ones(3, 8, 8))


@pytest.mark.parametrize(
    "options",
    [
        *({"size": (0, 5)}, {"size": (5,)}, {"std": (1, 0, 1)}, {"mean": (0, 0)}),
        *({"crop": 0}, {"crop": 1.1}, {"interpolation": "cubic"}),
    ],
)
def test_invalid_preprocessing_is_rejected(options: dict) -> None:
    (name,) = options
    with pytest.raises(UserError, match=f"{name}(=| 'cubic'; did you mean 'bicubic')"):
        Preprocess(**{"size": (5, 5), "mean": MEAN, "std": STD} | options)


def apply(augment: Augment, image: Image.Image, seed: int = 0, preprocess: Preprocess = PLAIN) -> np.ndarray:
    return np.asarray(augment(image, preprocess, np.random.default_rng(seed)))


def test_the_default_is_the_evaluation_transform() -> None:
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
def test_every_option_has_an_effect_determined_by_its_generator(change: dict) -> None:
    augment, image = Augment(**change), noise()
    first = apply(augment, image, 1)
    assert (first != np.asarray(image)).any()
    np.testing.assert_array_equal(first, apply(augment, image, 1))
    if change != {"flip": 1.0}:
        assert (first != apply(augment, image, 2)).any()


def test_flips_mirror_the_image_with_the_given_probability() -> None:
    image = noise()
    np.testing.assert_array_equal(apply(Augment(flip=1.0), image), np.asarray(image)[:, ::-1])
    flips = sum((apply(Augment(flip=0.25), image, seed) != np.asarray(image)).any() for seed in range(200))
    assert 22 < flips < 78  # 50 ± 4.6 standard deviations


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


def test_affine_changes_use_their_whole_range() -> None:
    size33 = Preprocess((33, 33), (0, 0, 0), (1, 1, 1))
    shifts, angles, reaches = [], [], []
    for seed in range(60):
        x, y = centre(apply(Augment(translate=0.1), dot(16, 16), seed, size33))
        shifts += [x - 16, y - 16]
        x, y = centre(apply(Augment(rotate=15), dot(26, 16), seed, size33))
        angles.append(np.degrees(np.arctan2(y - 16, x - 16)))
        x, y = centre(apply(Augment(scale=(0.8, 1.2)), dot(26, 16), seed, size33))
        reaches.append((x - 16) / 10)
    for found, low, high in ((shifts, -3.3, 3.3), (angles, -15, 15), (reaches, 0.8, 1.2)):
        slack = 0.05 * (high - low)
        assert low - slack <= min(found) < low + 5 * slack
        assert high - 5 * slack < max(found) <= high + slack


def test_uncovered_pixels_are_black() -> None:
    white = Image.new("RGB", (32, 32), "white")
    moved = apply(Augment(scale=(0.5, 0.5)), white)
    assert moved[0, 0].tolist() == [0, 0, 0]
    assert moved[16, 16].tolist() == [255, 255, 255]


@settings(max_examples=50)
@given(
    size=st.tuples(st.integers(1, 64), st.integers(1, 64)),
    width=st.integers(1, 400),
    height=st.integers(1, 400),
    seed=st.integers(0, 2**32),
)
def test_random_crops_fit_and_have_the_given_area(
    size: tuple[int, int], width: int, height: int, seed: int
) -> None:
    augment, preprocess = Augment(crop_area=(0.2, 0.5)), Preprocess(size, (0, 0, 0), (1, 1, 1))
    image = Image.new("RGB", (width, height))
    left, top, right, bottom = augment._crop_box(image, preprocess, np.random.default_rng(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    stretch = (right - left) / (bottom - top) / (size[1] / size[0])
    assert 3 / 4 - 1e-6 <= stretch <= 4 / 3 + 1e-6
    share = (right - left) * (bottom - top) / (width * height)
    touches = right - left > width * 0.999 or bottom - top > height * 0.999
    assert share <= 0.5 + 1e-6
    assert share >= 0.2 - 1e-6 or touches


def test_brightness_uses_its_whole_range() -> None:
    grey = Image.new("RGB", (32, 32), (100, 100, 100))
    levels = [int(apply(Augment(brightness=0.2), grey, seed)[0, 0, 0]) for seed in range(100)]
    assert 80 <= min(levels) < 85
    assert 115 < max(levels) <= 120


def test_presets_by_name() -> None:
    assert as_augment("photo", PRESETS) is PRESETS["photo"]
    own = Augment(flip=0.1)
    assert as_augment(own, PRESETS) is own
    with pytest.raises(UserError, match="unknown augmentation 'digit'; did you mean 'digits'"):
        as_augment("digit", PRESETS)


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
        {"shift": -1},
    ],
)
def test_invalid_augmentation_is_rejected(change: dict) -> None:
    (name,) = change
    with pytest.raises(UserError, match=f"{name}="):
        Augment(**change)


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "original", "v0-mstd0.5", "augmix-m3-w2"])
def test_policies_depend_on_the_generator_of_the_item_only(policy: str) -> None:
    augment, image = Augment(policy=policy), noise()
    outputs = [apply(augment, image, seed) for seed in range(12)]
    np.random.seed(5)
    for seed, output in enumerate(outputs):
        np.testing.assert_array_equal(output, apply(augment, image, seed))
    assert sum((output != np.asarray(image)).any() for output in outputs) > 4


def test_policies_are_timms_transforms_with_the_given_parameters() -> None:
    transform = policy_transform("rand-m9-mstd0.5-inc1", 32, PLAIN.mean)
    assert isinstance(transform, RandAugment)
    assert transform.num_layers == 2
    assert {op.magnitude for op in transform.ops} == {9}
    assert {op.magnitude_std for op in transform.ops} == {0.5}
    assert "PosterizeIncreasing" in {op.name for op in transform.ops}
    assert transform.ops[0].kwargs["fillcolor"] == (128, 64, 26)
    assert isinstance(policy_transform("original", 32, PLAIN.mean), AutoAugment)
    image, augment = noise(), Augment(policy="rand-m9-mstd0.5-inc1")
    with seeded_globals(np.random.default_rng(3)):
        expected = transform(image)
    np.testing.assert_array_equal(apply(augment, image, 3), np.asarray(expected))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("ran-m9", "unknown augmentation policy 'ran'; did you mean 'rand'"),
        ("rand-m9-foo", "'foo' is not understood; write for example 'rand-m9-mstd0.5-inc1'"),
        ("original-m9", "'m9' is not understood"),
        ("rand-m9_mstd0.5", "'m9_mstd0.5' is not understood"),
        ("", "unknown augmentation policy ''"),
    ],
)
def test_invalid_policies_are_rejected(policy: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Augment(policy=policy)


def test_erasing_replaces_a_rectangle_by_noise_with_the_given_probability() -> None:
    augment, erased = Augment(erase=0.25), 0
    for seed in range(200):
        image = torch.zeros(3, 32, 32)
        augment.random_erasing(image, np.random.default_rng(seed))
        changed = (image != 0).any(0)
        erased += bool(changed.any())
        if changed.any():
            rows, columns = changed.any(1).sum(), changed.any(0).sum()
            assert rows * columns == changed.sum()
            assert 0.01 < changed.float().mean() < 0.36
            assert image[:, changed].std() > 0.5
    assert 25 < erased < 75  # 50 ± 4 standard deviations


def test_shifts_are_whole_pixels_and_uncover_black() -> None:
    image = noise()
    seen = set()
    for seed in range(60):
        out = apply(Augment(shift=2), image, seed)
        padded = np.pad(np.asarray(image), ((2, 2), (2, 2), (0, 0)))
        places = [
            (y - 2, x - 2)
            for y in range(5)
            for x in range(5)
            if np.array_equal(padded[y : y + 32, x : x + 32], out)
        ]
        assert len(places) == 1
        seen.add(places[0])
    assert len(seen) > 15


def mixed(
    mixup: float, cutmix: float, *, seed: int = 0, count: int = 8, smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    images = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(count) % 5
    mix = Mix(mixup=mixup, cutmix=cutmix, smoothing=smoothing, classes=5)
    out, targets = mix(images.clone(), labels, generator(seed))
    return images, labels, out, targets


@pytest.mark.parametrize("seed", range(3))
def test_mixup_blends_images_and_targets_alike(seed: int) -> None:
    images, labels, out, targets = mixed(0.8, 0.0, seed=seed)
    share = targets[0, labels[0]].item()  # the first and the last image are of different classes
    assert 0 < share < 1
    torch.testing.assert_close(out, share * images + (1 - share) * images.flip(0))
    one_hot = torch.eye(5)[labels]
    torch.testing.assert_close(targets, share * one_hot + (1 - share) * one_hot.flip(0))


@pytest.mark.parametrize("seed", range(3))
def test_cutmix_pastes_a_rectangle_and_weights_the_targets_by_its_area(seed: int) -> None:
    images, labels, out, targets = mixed(0.0, 1.0, seed=seed)
    pasted = (out != images).any(1)  # (B, 8, 8)
    torch.testing.assert_close(torch.where(pasted[:, None], images.flip(0), images), out)
    assert targets[0, labels[0]].item() == pytest.approx(1 - pasted[0].float().mean().item(), abs=1e-6)
    rows, columns = pasted[0].any(1).nonzero(), pasted[0].any(0).nonzero()
    if len(rows):
        area = (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)
        assert area == pasted[0].sum(), "a rectangle"


def test_mixup_and_cutmix_are_equally_likely() -> None:
    """Mixup changes every pixel, CutMix only some."""
    results = [mixed(0.8, 1.0, seed=seed) for seed in range(60)]
    changed = [(out != images).float().mean() for images, _, out, _ in results]
    blended = sum(share.item() > 0.999 for share in changed)
    assert 15 < blended < 45


def test_mixing_depends_on_the_generator_only() -> None:
    first = mixed(0.8, 1.0, seed=3)[2]
    np.random.seed(2)
    assert torch.equal(mixed(0.8, 1.0, seed=3)[2], first)
    assert not torch.equal(mixed(0.8, 1.0, seed=4)[2], first)


@pytest.mark.parametrize("count", [1, 5])
def test_the_last_of_an_odd_number_is_not_mixed(count: int) -> None:
    images, labels, out, targets = mixed(0.8, 0.0, count=count)
    assert torch.equal(out[-1], images[-1])
    assert targets[-1].tolist() == torch.eye(5)[labels[-1]].tolist()
    assert targets.shape == (count, 5)


def test_targets_are_smoothed() -> None:
    _, _, _, targets = mixed(0.8, 0.0, smoothing=0.1, count=5)
    assert targets.sum(1).tolist() == pytest.approx([1.0] * 5)
    assert targets.min().item() == pytest.approx(0.02)


def test_parts_of_a_batch_are_mixed_like_the_whole() -> None:
    images = torch.rand(16, 3, 8, 8)
    labels = torch.arange(16) % 5
    whole = Batch(images, labels, torch.arange(16), ())
    mix = Mix(mixup=0.8, cutmix=1.0, smoothing=0.1, classes=5)
    for seed in range(2):
        expected, targets = mix(images.clone(), labels, generator(seed))
        for piece in whole.split(4):
            out, soft = mix(piece.images.clone(), piece.labels, generator(seed))
            torch.testing.assert_close(out, expected[piece.index])
            torch.testing.assert_close(soft, targets[piece.index])


@pytest.mark.parametrize("policy", ["rand-m10-mstd0.5-inc1", "original", "augmix-m10"])
def test_policies_keep_a_bit_per_channel(policy: str) -> None:
    """timm's policies may ask for 0 bits, which Pillow refuses."""
    transform: Any = policy_transform(policy, 32, (0.5, 0.5, 0.5))
    groups = getattr(transform, "policy", None) or [transform.ops]
    (posterize, *_) = [op.aug_fn for group in groups for op in group if op.name.startswith("Posterize")]
    image = Image.fromarray(np.full((4, 4, 3), 200, np.uint8))
    assert np.asarray(posterize(image, 0)).tolist() == np.full((4, 4, 3), 128).tolist()
