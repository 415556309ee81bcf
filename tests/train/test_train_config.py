from __future__ import annotations

from typing import Any

import pytest

from visualtokens.errors import UserError
from visualtokens.train import TrainConfig


def make(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"model": "paca_vit_nano", "data": "digits", "out": "run", **changes})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("batch", 0),
        ("size", 0),
        ("seed", -1),
        ("workers", -1),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("min_lr", -1e-6),
        ("min_lr", 1.0),
        ("weight_decay", -0.1),
        ("weight_decay", float("nan")),
        ("clip", -1.0),
        ("label_smoothing", 1.0),
        ("label_smoothing", -0.1),
        ("warmup_epochs", -1.0),
        ("warmup_epochs", 11.0),
    ],
)
def test_what_cannot_work_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"^{name}={value} must be ") as caught:
        make(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("epochs", "warmup"), [(1, 0.1), (10, 1.0), (300, 5.0)])
def test_default_warm_up_is_a_tenth_and_at_most_five_epochs(epochs: int, warmup: float) -> None:
    assert make(epochs=epochs).warmup == pytest.approx(warmup)


def test_a_given_warm_up_is_taken() -> None:
    assert make(warmup_epochs=0).warmup == 0


def test_overwrite_and_resume_exclude_each_other() -> None:
    with pytest.raises(UserError, match="exclude each other"):
        make(overwrite=True, resume=True)
