"""Shares of a batch, images held out for validation, and seeded random streams."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from visualtokens.data import Share, derive_seed, generator
from visualtokens.data.arrays import Digits
from visualtokens.data.base import held_out, seeded_globals, with_classes
from visualtokens.errors import UserError


@given(count=st.integers(0, 200), parts=st.integers(1, 9))
@settings(max_examples=50)
def test_shares_are_disjoint_even_and_ascending(count: int, parts: int) -> None:
    shares = [Share(part, parts).of(count) for part in range(parts)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(count))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert all((np.diff(share) > 0).all() for share in shares)


@given(half=st.integers(1, 30), parts=st.integers(1, 6))
@settings(max_examples=30)
def test_mixup_partners_are_in_the_same_share(half: int, parts: int) -> None:
    count = 2 * half * parts
    for part in range(parts):
        positions = Share(part, parts).of(count)
        np.testing.assert_array_equal(positions + positions[::-1], count - 1)


def test_mixup_partners_are_in_the_same_share_of_a_share() -> None:
    outer = Share(1, 2).of(16)
    for part in range(2):
        positions = outer[Share(part, 2).of(len(outer))]
        np.testing.assert_array_equal(positions + positions[::-1], 15)


@pytest.mark.parametrize(("part", "parts"), [(2, 2), (-1, 2), (0, 0)])
def test_a_part_out_of_range_is_rejected(part: int, parts: int) -> None:
    with pytest.raises(UserError, match=f"part {part} of {parts} does not exist"):
        Share(part, parts)


def test_streams_are_distinct_and_repeatable() -> None:
    streams = [(), *product(range(3)), *product(range(3), repeat=2), *product(range(3), repeat=3)]
    draws = {generator(seed, *stream).integers(2**63) for seed in range(3) for stream in streams}
    assert len(draws) == 3 * len(streams)  # including (1,) and (1, 0), which plain seeding confuses
    assert generator(1, 2, 3).random() == generator(1, 2, 3).random()
    assert len({derive_seed(1, *stream) for stream in streams}) == len(streams)


def test_seeded_globals_are_repeatable_and_restore_the_state() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.random(), torch.rand(()).item()

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    draws = []
    for seed in (0, 0, 1):
        with seeded_globals(np.random.default_rng(seed)):
            draws.append(draw())
    assert draws[0] == draws[1]
    assert all(a != b for a, b in zip(draws[1], draws[2], strict=True))
    assert random.getstate() == before[0]
    np.testing.assert_equal(np.random.get_state(), before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


LABELLED = st.dictionaries(st.text(max_size=4), st.integers(0, 3), max_size=40)


@given(items=LABELLED, share=st.floats(0.01, 0.99), randomness=st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_every_label_is_held_out_in_part(
    items: dict[str, int], share: float, randomness: random.Random
) -> None:
    held = held_out(list(items), share, labels=list(items.values()))
    assert held.shape == (len(items),)
    for label in set(items.values()):
        count = [each for each, other in zip(held, items.values(), strict=True) if other == label]
        expected = round(share * len(count))
        assert sum(count) == (0 if len(count) == 1 else min(max(expected, 1), len(count) - 1))
    shuffled = randomness.sample(sorted(items), len(items))  # the order in which a disk lists them
    again = held_out(shuffled, share, labels=[items[name] for name in shuffled])
    assert dict(zip(items, held, strict=True)) == dict(zip(shuffled, again, strict=True))


@given(items=LABELLED, share=st.floats(0.1, 0.9), new=st.text(min_size=5))
@settings(max_examples=50)
def test_a_new_item_moves_at_most_one_other(items: dict[str, int], share: float, new: str) -> None:
    before = held_out(list(items), share, labels=list(items.values()))
    after = held_out([*items, new], share, labels=[*items.values(), 0])[:-1]
    assert (before != after).sum() <= 1


def test_items_of_the_same_name_stay_together() -> None:
    names = [str(i % 7) for i in range(21)]
    held = held_out(names, 0.3)
    assert held.sum() == 6  # two names of seven
    np.testing.assert_array_equal(held[:7], held[7:14])
    np.testing.assert_array_equal(held[:7], held[14:])


def test_all_or_an_invalid_share_are_held_out() -> None:
    assert held_out(["a", "b"], 1.0, labels=[0, 1]).all()
    assert not held_out(["a", "b"], 0.9, labels=[0, 1]).any()  # single images are trained on
    for share in (0.0, -0.1, 1.1, float("nan")):
        with pytest.raises(UserError, match="must be more than 0 and at most 1"):
            held_out(["a"], share)


def test_labels_of_other_classes() -> None:
    digits = Digits("val")
    assert with_classes(digits, digits.classes) is digits
    assert with_classes(digits, digits.classes[:9]) is digits  # not all of its classes
    names = ["none", *map(str, range(9, -1, -1))]
    mapped = with_classes(digits, names)
    assert with_classes(digits, [f"digit {name}" for name in names]) is digits
    assert with_classes(digits, [f"digit {name}" for name in names], names)[5][1] == mapped[5][1]
    assert (mapped.classes, len(mapped), mapped.spec) == (names, len(digits), "digits")
    for index in (0, 5):
        (image, label), (other, number) = digits[index], mapped[index]
        assert (image, digits.classes[label], digits.path(index)) == (
            other,
            names[number],
            mapped.path(index),
        )
