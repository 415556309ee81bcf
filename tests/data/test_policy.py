"""timm's policies and random erasing, as part of :class:`Augment`."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.auto_augment import AutoAugment, RandAugment

from visualtokens.data import Augment, Preprocess, create_loader, open_dataset
from visualtokens.data.base import seeded_globals
from visualtokens.data.transforms import policy_transform
from visualtokens.errors import UserError

PLAIN = Preprocess((32, 32), (0.5, 0.25, 0.1), (1, 1, 1))


def noise() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))


def apply(augment: Augment, seed: int) -> np.ndarray:
    return np.asarray(augment(noise(), PLAIN, np.random.default_rng(seed)))


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "original", "v0-mstd0.5", "augmix-m3-w2"])
def test_the_generator_of_the_item_decides(policy: str) -> None:
    augment = Augment(policy=policy)
    before = random.getstate(), torch.get_rng_state()
    images = [apply(augment, seed) for seed in range(12)]
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    random.seed(5)
    np.random.seed(5)
    for seed, image in enumerate(images):
        np.testing.assert_array_equal(image, apply(augment, seed))
    assert sum((image != np.asarray(noise())).any() for image in images) > 4


def test_it_is_timms_transform_with_the_parameters_asked_for() -> None:
    transform = policy_transform("rand-m9-mstd0.5-inc1", 32, PLAIN.mean)
    assert isinstance(transform, RandAugment)
    assert transform.num_layers == 2
    assert {op.magnitude for op in transform.ops} == {9}
    assert {op.magnitude_std for op in transform.ops} == {0.5}
    assert "PosterizeIncreasing" in {op.name for op in transform.ops}
    assert transform.ops[0].kwargs["fillcolor"] == (128, 64, 26)
    assert isinstance(policy_transform("original", 32, PLAIN.mean), AutoAugment)
    image, augment = noise(), Augment(policy="rand-m9-mstd0.5-inc1")
    rng, twin = np.random.default_rng(3), np.random.default_rng(3)
    with seeded_globals(twin):
        expected = transform(image)
    np.testing.assert_array_equal(np.asarray(augment(image, PLAIN, rng)), np.asarray(expected))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("ran-m9", "unknown augmentation policy 'ran'; did you mean 'rand'"),
        ("rand-m9-foo", "'foo' is not understood; write for example 'rand-m9-mstd0.5-inc1'"),
        ("rand-m", "'m' is not understood"),
        ("original-m9", "'m9' is not understood"),
        ("rand-m9_mstd0.5", "'m9_mstd0.5' is not understood"),
        ("", "unknown augmentation policy ''"),
    ],
)
def test_policies_that_timm_would_misread(policy: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Augment(policy=policy)


def test_erasing_is_as_frequent_as_asked_and_a_rectangle_of_noise() -> None:
    augment, erased = Augment(erase=0.25), 0
    for seed in range(400):
        image = torch.zeros(3, 32, 32)
        augment.add_noise(image, np.random.default_rng(seed))
        changed = (image != 0).any(0)
        erased += bool(changed.any())
        if changed.any():
            rows, columns = changed.any(1).sum(), changed.any(0).sum()
            assert rows * columns == changed.sum()
            assert 0.01 < changed.float().mean() < 0.36
            assert image[:, changed].std() > 0.5
    assert 65 < erased < 135  # 100 ± 4 standard deviations


def test_a_loader_erases_by_item_whatever_the_workers() -> None:
    digits, augment = open_dataset("digits", "val"), Augment(erase=0.5, policy="rand-m9")
    batches = [
        next(iter(create_loader(digits, PLAIN, batch=16, train=True, workers=workers, augment=augment)))
        for workers in (0, 2)
    ]
    assert torch.equal(batches[0].images, batches[1].images)
    clean = Augment(policy="rand-m9")
    (without,) = [next(iter(create_loader(digits, PLAIN, batch=16, train=True, augment=clean)))]
    changed = (without.images != batches[0].images).flatten(1).any(1)
    assert 2 <= changed.sum() <= 14


def test_shifts_are_whole_pixels_and_uncover_black() -> None:
    image = noise()
    seen = set()
    for seed in range(60):
        out = np.asarray(Augment(shift=2)(image, PLAIN, np.random.default_rng(seed)))
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
    with pytest.raises(UserError, match="shift=-1 is negative"):
        Augment(shift=-1)
