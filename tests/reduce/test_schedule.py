from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from visualtokens import papers
from visualtokens.errors import UserError
from visualtokens.reduce import Schedule, published_schedules
from visualtokens.reduce.schedule import PUBLISHED


def tokens(keep: object, patches: int = 196, blocks: int = 12) -> tuple[int, ...]:
    return Schedule.of(keep, blocks).tokens(patches)


def test_a_list_is_taken_as_it_is_and_may_not_rise() -> None:
    assert tokens([196, 100, 7, 2, 0], blocks=5) == (196, 100, 7, 2, 0)
    assert tokens([5, 7, 2, 3], blocks=4) == (5, 5, 2, 2)
    assert tokens([300, 250], blocks=2) == (196, 196)
    assert tokens(np.array([12, 8]).tolist(), blocks=2) == (12, 8)


def test_a_share_is_what_is_left_in_the_end() -> None:
    after = tokens(0.25)
    assert after[-1] == 49
    shares = [b / a for a, b in zip((196, *after), after, strict=False)]
    assert max(shares) - min(shares) < 0.03  # every block takes the same, but for rounding
    assert tokens(1.0) == (196,) * 12
    assert tokens(1.0, patches=9, blocks=3) == (9, 9, 9)


def test_a_negative_number_goes_from_every_block_but_never_more_than_half() -> None:
    assert tokens(-13) == tuple(196 - 13 * (i + 1) for i in range(12))
    assert tokens(-100, blocks=5) == (98, 49, 25, 13, 7)
    assert tokens([-3, 0.5, -1], patches=10, blocks=3) == (7, 5, 4)


@pytest.mark.parametrize("model", PUBLISHED)
@pytest.mark.parametrize("level", range(8))
def test_published_schedules_are_those_of_the_tables(model: str, level: int) -> None:
    printed = papers.schedule({"deit_small": "deit_s"}.get(model, model), level)
    assert PUBLISHED[model][level] == printed
    running = [min(printed[: i + 1]) for i in range(12)]
    assert tokens(f"{model}/{level}") == tuple(running)


def test_published_schedules_scale_with_the_image() -> None:
    assert tokens("deit_small/3", patches=784)[5] == 4 * 85
    assert len(published_schedules()) == 24
    assert all(len(tokens(name)) == 12 for name in published_schedules())


@given(
    keep=st.lists(st.one_of(st.integers(-50, 300), st.floats(0, 1)), min_size=1, max_size=12),
    patches=st.integers(1, 400),
)
def test_counts_never_rise_and_fit(keep: list[int | float], patches: int) -> None:
    after = tokens(keep, patches=patches, blocks=len(keep))
    assert all(0 <= b <= a <= patches for a, b in zip((patches, *after), after, strict=False))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (13, "keep=-13"),
        ([1, 2, 3], "3 entries, the model 12 blocks"),
        (1.5, "keep is 1.5"),
        ([0.5] * 11 + [True], r"keep\[11\] is True"),
        ([0.5] * 11 + ["x"], r"keep\[11\] is 'x'"),
        (float("nan"), "keep is nan"),
        ("deit_smal/3", "deit_small/"),
        ("deit_small/8", "deit_small/0 to deit_small/7"),
        ("deit_small", "deit_small/0 to"),
    ],
)
def test_errors_name_the_way_out(keep: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tokens(keep)
