"""Random numbers that depend on what they are for, and on nothing that was drawn before."""

from __future__ import annotations

import numpy as np

from visualtokens.errors import UserError


def generator(seed: int, *stream: int) -> np.random.Generator:
    """The generator of one stream, such as ``generator(seed, epoch, index)``.

    Streams of different numbers or different lengths are independent.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stream))


def check_seed(seed: int) -> None:
    if seed < 0:
        raise UserError(f"seed={seed} is negative; give 0 or more")
