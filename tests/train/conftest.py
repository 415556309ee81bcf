"""A dataset that trains in a second: a few real digits in an .npz file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.digits import save_digits
from visualtokens.train import TrainConfig


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bits depend on how sums are split over threads; the tests compare bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def few_digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The spec of 96 digits to train and 40 to validate."""
    return save_digits(tmp_path_factory.mktemp("data") / "few.npz", train=96, val=40)


@pytest.fixture
def config(few_digits: str, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Makes configurations of a short run of the smallest model."""

    def make(**changes: Any) -> TrainConfig:
        options = dict(
            model="paca_vit_nano",
            data=few_digits,
            out=str(tmp_path / "run"),
            epochs=2,
            batch=32,
            augment="digits",
            device="cpu",
        )
        return TrainConfig(**{**options, **changes})

    return make
