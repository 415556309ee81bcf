"""Mixup and CutMix against their definitions, written out."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from visualtokens.data import Mix, generator


def mixed(
    mixup: float, cutmix: float, *, seed: int = 0, count: int = 8, smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    images = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(count) % 5
    mix = Mix(mixup=mixup, cutmix=cutmix, smoothing=smoothing, classes=5)
    out, targets = mix(images.clone(), labels, generator(seed))
    return images, labels, out, targets


@pytest.mark.parametrize("seed", range(5))
def test_mixup_blends_mirror_places_as_the_targets_say(seed: int) -> None:
    images, labels, out, targets = mixed(0.8, 0.0, seed=seed)
    share = targets[0, labels[0]].item()  # the first and the last image are of different classes
    assert 0 < share < 1
    torch.testing.assert_close(out, share * images + (1 - share) * images.flip(0))
    one_hot = torch.eye(5)[labels]
    torch.testing.assert_close(targets, share * one_hot + (1 - share) * one_hot.flip(0))


@pytest.mark.parametrize("seed", range(5))
def test_cutmix_pastes_a_rectangle_of_the_share_that_the_targets_say(seed: int) -> None:
    images, labels, out, targets = mixed(0.0, 1.0, seed=seed)
    pasted = (out != images).any(1)  # (B, 8, 8)
    torch.testing.assert_close(torch.where(pasted[:, None], images.flip(0), images), out)
    assert targets[0, labels[0]].item() == pytest.approx(1 - pasted[0].float().mean().item(), abs=1e-6)
    rows, columns = pasted[0].any(1).nonzero(), pasted[0].any(0).nonzero()
    if len(rows):
        area = (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)
        assert area == pasted[0].sum(), "a rectangle"


def test_both_take_turns() -> None:
    """Mixup changes every pixel, CutMix only some."""
    changed = [(mixed(0.8, 1.0, seed=s)[2] != mixed(0.8, 1.0, seed=s)[0]).float().mean() for s in range(60)]
    blended = sum(share.item() > 0.999 for share in changed)
    assert 15 < blended < 45


def test_the_generator_decides_and_nothing_outside_matters_or_moves() -> None:
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    first = mixed(0.8, 1.0, seed=3)[2]
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    np.random.seed(2)
    assert torch.equal(mixed(0.8, 1.0, seed=3)[2], first)
    assert not torch.equal(mixed(0.8, 1.0, seed=4)[2], first)


@pytest.mark.parametrize("count", [1, 5])
def test_the_last_of_an_odd_number_stays_alone(count: int) -> None:
    images, labels, out, targets = mixed(0.8, 0.0, count=count)
    assert torch.equal(out[-1], images[-1])
    assert targets[-1].tolist() == torch.eye(5)[labels[-1]].tolist()
    assert targets.shape == (count, 5)


def test_targets_are_smoothed() -> None:
    _, _, _, targets = mixed(0.8, 0.0, smoothing=0.1, count=5)
    assert targets.sum(1).tolist() == pytest.approx([1.0] * 5)
    assert targets.min().item() == pytest.approx(0.02)


def test_parts_of_a_batch_are_mixed_as_the_whole_is() -> None:
    from visualtokens.data import Batch

    images = torch.rand(16, 3, 8, 8)
    labels = torch.arange(16) % 5
    whole = Batch(images, labels, torch.arange(16), ())
    mix = Mix(mixup=0.8, cutmix=1.0, smoothing=0.1, classes=5)
    for seed in range(4):
        expected, targets = mix(images.clone(), labels, generator(seed))
        for piece in whole.split(4):
            out, soft = mix(piece.images.clone(), piece.labels, generator(seed))
            torch.testing.assert_close(out, expected[piece.index])
            torch.testing.assert_close(soft, targets[piece.index])
