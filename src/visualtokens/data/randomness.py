"""Random numbers that depend on what they are for, and on nothing that was drawn before."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator

import numpy as np
import torch

from visualtokens.errors import UserError

_GLOBALS = threading.Lock()


def generator(seed: int, *stream: int) -> np.random.Generator:
    """The generator of one stream, such as ``generator(seed, epoch, index)``.

    Streams of different numbers or different lengths are independent.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stream))


def derive_seed(seed: int, *stream: int) -> int:
    """A seed of 32 bits for a library that wants one, of the same kind of stream."""
    return int(np.random.SeedSequence(seed, spawn_key=stream).generate_state(1)[0])


@contextlib.contextmanager
def seeded_globals(rng: np.random.Generator) -> Iterator[None]:
    """Let ``rng`` seed the global generators that timm draws from; afterwards they are as they were.

    These are Python's, NumPy's and torch's on the CPU.
    """
    seeds = rng.integers(2**32, size=3)
    with _GLOBALS:  # one thread at a time
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.seed(int(seeds[0]))
        np.random.seed(int(seeds[1]))
        torch.default_generator.manual_seed(int(seeds[2]))
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])


def check_seed(seed: int) -> None:
    if seed < 0:
        raise UserError(f"seed={seed} is negative; give 0 or more")
