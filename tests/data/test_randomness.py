from __future__ import annotations

from itertools import product

from visualtokens.data.base import generator


def test_streams_are_all_different() -> None:
    streams = [(), *product(range(3)), *product(range(3), repeat=2), *product(range(3), repeat=3)]
    draws = {generator(seed, *stream).integers(2**63) for seed in range(3) for stream in streams}
    assert len(draws) == 3 * len(streams)  # (1,) and (1, 0) too, which plain seeding confuses


def test_a_stream_can_be_drawn_again() -> None:
    assert generator(1, 2, 3).random() == generator(1, 2, 3).random()
