"""Checks of the training options."""

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
        ("accumulate", 0),
        ("keep", 0),
        ("log_every", 0),
        ("max_bad_steps", 0),
        ("save_every", 0),
        ("size", 0),
        ("seed", -1),
        ("workers", -1),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("min_lr", -1e-6),
        ("min_lr", 1.0),
        ("warmup_lr", 1.0),
        ("weight_decay", -0.1),
        ("weight_decay", float("nan")),
        ("clip", -1.0),
        ("mixup", -0.1),
        ("cutmix", float("inf")),
        ("random_erasing", 1.5),
        ("max_bad_images", -0.1),
        ("ema", 1.0),
        ("ema", 0.0),
        ("layer_decay", 1.0),
        ("drop_path", 1.0),
        ("label_smoothing", 1.0),
        ("label_smoothing", -0.1),
        ("warmup_epochs", -1.0),
        ("warmup_epochs", 11.0),
    ],
)
def test_value_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"^{name}={value} must be ") as caught:
        make(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay_epochs": 3.0}, "decay_epochs=3.0 has no effect with schedule=cosine; leave it out or give"),
        ({"schedule": "step", "decay_epochs": [8.0, 3.0]}, "decay_epochs=[8.0, 3.0] must be rising, from 0"),
        ({"schedule": "step", "decay_epochs": [8.0, 99.0]}, "decay_epochs=[8.0, 99.0] must be rising"),
        ({"decay_rate": 0.5}, "decay_rate=0.5 has no effect with schedule=cosine"),
        ({"schedule": "step", "min_lr": 0.0}, "min_lr=0.0 has no effect with schedule=step"),
        ({"warmup_epochs": 0.0, "warmup_lr": 0.0}, "warmup_lr=0.0 has no effect with warmup_epochs=0.0"),
        ({"distill": 0.5}, "distill=0.5 has no effect with teacher=None; leave it out or give a --teacher"),
        ({"distill_temperature": 2.0}, "distill_temperature=2.0 has no effect with teacher=None"),
        ({"teacher": "x", "distill": 0.0}, "distill=0.0 must be more than 0"),
        ({"schedule": "cosin"}, "unknown schedule 'cosin'; did you mean 'cosine'"),
        ({"log": ["wandv"]}, "unknown log 'wandv'; did you mean 'wandb'"),
        ({"overwrite": True, "resume": True}, "overwrite and resume exclude each other"),
        ({"overwrite": True, "resume": "auto"}, "overwrite and resume exclude each other"),
        ({"resume": "never"}, "resume='never' must be true, false or auto"),
        (
            {"drop_path": 0.1, "model_args": {"drop_path_rate": 0.1}},
            "drop_path and model_args.drop_path_rate are the same option",
        ),
    ],
)
def test_conflicting_or_ineffective_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        make(**options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("epochs", "warmup"), [(1, 0.1), (10, 1.0), (300, 5.0)])
def test_default_warm_up_is_a_tenth_and_at_most_five_epochs(epochs: int, warmup: float) -> None:
    assert make(epochs=epochs).warmup == pytest.approx(warmup)


def test_given_warm_up() -> None:
    assert make(warmup_epochs=0).warmup == 0


def test_refuse_raises_for_given_options_only() -> None:
    config = make(mixup=0.8, model_args={"x": 1})
    config.refuse(["cutmix", "loss_args", "teacher"])
    with pytest.raises(UserError, match=r"mixup=0\.8 has no effect with task=classify; leave it out"):
        config.refuse(["cutmix", "mixup"])
