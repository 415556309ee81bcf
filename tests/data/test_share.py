from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from visualtokens.data import Share
from visualtokens.errors import UserError


@given(count=st.integers(0, 200), parts=st.integers(1, 9))
def test_every_place_is_in_one_part_and_parts_are_even(count: int, parts: int) -> None:
    shares = [Share(part, parts).of(count) for part in range(parts)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(count))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert all((np.diff(share) > 0).all() for share in shares)


@given(half=st.integers(1, 30), parts=st.integers(1, 6))
def test_mirror_places_stay_together_and_stay_mirrored(half: int, parts: int) -> None:
    count = 2 * half * parts
    for part in range(parts):
        places = Share(part, parts).of(count)
        np.testing.assert_array_equal(places + places[::-1], count - 1)


def test_a_share_of_a_share_keeps_mirror_places_together() -> None:
    outer = Share(1, 2).of(16)
    for part in range(2):
        places = outer[Share(part, 2).of(len(outer))]
        np.testing.assert_array_equal(places + places[::-1], 15)


@pytest.mark.parametrize(("part", "parts"), [(2, 2), (-1, 2), (0, 0)])
def test_parts_that_do_not_exist(part: int, parts: int) -> None:
    with pytest.raises(UserError, match=f"part {part} of {parts} does not exist"):
        Share(part, parts)
