"""Shares of a batch and seeded random streams."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from visualtokens.data import Share, derive_seed, generator
from visualtokens.data.base import seeded_globals
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
