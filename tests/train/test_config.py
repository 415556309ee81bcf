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
        ({"init": "x", "pretrained": True}, "pretrained and init exclude each other; give one of them"),
        (
            {"init": "x", "model_args": {"init_from": "y"}},
            "init and model_args.init_from exclude each other; give one of them",
        ),
        ({"model_args": {"pretrained": True}}, "model_args may not hold 'pretrained'; give --pretrained"),
        ({"freeze": 2}, "freeze=2 would keep random weights; give --pretrained or --init as well"),
        ({"probe": True}, "probe would keep random weights; give --pretrained or --init as well"),
        ({"init": "x", "freeze": -1}, "freeze=-1 must be backbone or a number, at least 0"),
        ({"init": "x", "freeze": "stem"}, "freeze=stem must be backbone or a number, at least 0"),
        ({"init": "x", "freeze": 1, "probe": True}, "probe freezes the backbone; leave freeze=1 out"),
        (
            {"init": "x", "task": "segment", "probe": True},
            "probe is for classification; with task=segment give --freeze backbone",
        ),
        (
            {"init": "x", "probe": True, "layer_decay": 0.5},
            "layer_decay=0.5 has no effect on a frozen backbone; leave it out",
        ),
        (
            {"init": "x", "freeze": "backbone", "drop_path": 0.1},
            "drop_path=0.1 has no effect on a frozen backbone; leave it out",
        ),
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


def test_weight_decay_of_a_linear_probe_is_0_unless_given() -> None:
    assert (make().decay, make(pretrained=True, probe=True).decay) == (0.05, 0.0)
    assert make(pretrained=True, probe=True, weight_decay=0.01).decay == 0.01
    assert make().filled()["weight_decay"] == 0.05


def test_frozen_layers() -> None:
    assert make(init="x", freeze=0).frozen == 0
    assert make(init="x", freeze="backbone").frozen == "backbone"
    assert make(init="x", probe=True).frozen == "backbone"
    assert make(model_args={"init_from": "resnet18"}, freeze=2).frozen == 2
