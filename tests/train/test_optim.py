from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.train.helpers import Make
from visualtokens.errors import UserError
from visualtokens.tasks.classify import build_model
from visualtokens.train import TrainConfig
from visualtokens.train.step import create_optimizer, create_schedule


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.position = nn.Parameter(torch.zeros(1, 5, 4))

    def no_weight_decay(self) -> set[str]:
        return {"position"}

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x) + self.position)


def by_name(model: nn.Module, config: TrainConfig, key: str) -> dict[str, float]:
    names = {id(p): name for name, p in model.named_parameters()}
    groups = create_optimizer(model, config).param_groups
    return {names[id(p)]: group[key] for group in groups for p in group["params"]}


@pytest.mark.parametrize("optimizer", ["adamw", "nesterov", "rmsproptf", "lamb"])
def test_biases_norms_and_exempted_parameters_do_not_decay(config: Make, optimizer: str) -> None:
    decay = by_name(Small(), config(weight_decay=0.3, optimizer=optimizer), "weight_decay")
    assert decay == {
        "linear.weight": 0.3,
        "linear.bias": 0.0,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "position": 0.0,
    }


def test_every_parameter_of_a_real_model_is_trained(config: Make) -> None:
    model = build_model("paca_vit_nano", classes=3, model_args={})
    decay = by_name(model, config(weight_decay=0.3), "weight_decay")
    assert decay.keys() == dict(model.named_parameters()).keys()
    assert {decay[name] for name, p in model.named_parameters() if p.ndim == 1} == {0.0}


def test_earlier_layers_learn_slower(config: Make) -> None:
    model = build_model("paca_vit_nano", classes=3, model_args={})
    settings = config(layer_decay=0.5, lr=0.1, weight_decay=0.3, warmup_epochs=0)
    scales = by_name(model, settings, "lr_scale")
    assert scales["head.weight"] == 1
    order = [scales[f"stages.{i}.blocks.0.ffn.fc1.weight"] for i in range(4)]
    assert order == sorted(order)
    assert order[0] < order[-1] < 1
    assert all(math.log2(scale) == round(math.log2(scale)) for scale in scales.values())
    optimizer = create_optimizer(model, settings)
    create_schedule(optimizer, settings, steps=3).step_update(0)
    assert {group["lr"] / group["lr_scale"] for group in optimizer.param_groups} == {0.1}


def rates(settings: TrainConfig, *, steps: int) -> list[float]:
    optimizer = create_optimizer(Small(), settings)
    schedule = create_schedule(optimizer, settings, steps=steps)
    found = []
    for step in range(settings.epochs * steps):
        schedule.step_update(step)
        (rate,) = {group["lr"] for group in optimizer.param_groups}
        found.append(rate)
    return found


@pytest.mark.parametrize("warmup", [0.0, 0.5, 1.0, 2.0])
def test_cosine(config: Make, warmup: float) -> None:
    start = {"warmup_lr": 0.02} if warmup else {}
    settings = config(epochs=4, lr=0.1, min_lr=0.01, warmup_epochs=warmup, **start)
    for step, rate in enumerate(rates(settings, steps=6)):
        rising = warmup * 6
        if step < rising:
            expected = 0.02 + (0.1 - 0.02) * step / rising
        else:
            expected = 0.01 + (0.1 - 0.01) * (1 + math.cos(math.pi * step / 24)) / 2
        assert rate == pytest.approx(expected), step


def test_steps_count_from_the_end_of_the_warm_up(config: Make) -> None:
    settings = config(
        epochs=9,
        lr=0.16,
        schedule="step",
        decay_epochs=2,
        decay_rate=0.5,
        warmup_epochs=1,
        warmup_lr=0.01,
    )
    found = rates(settings, steps=4)
    assert found[:4] == pytest.approx([0.01 + 0.15 * i / 4 for i in range(4)])
    assert found[4:] == pytest.approx([0.16 * 0.5 ** ((step - 4) // 8) for step in range(4, 36)])


def test_steps_at_the_epochs_that_are_given(config: Make) -> None:
    settings = config(
        epochs=12, lr=0.1, schedule="step", decay_epochs=[8.0, 11.0], warmup_epochs=0.5, warmup_lr=0.0
    )
    found = rates(settings, steps=4)
    assert found[:2] == pytest.approx([0.0, 0.05])
    assert found[2:] == pytest.approx([0.1] * 30 + [0.01] * 12 + [0.001] * 4)


def test_by_default_the_rate_starts_and_ends_near_nothing(config: Make) -> None:
    found = rates(config(epochs=10, lr=0.1), steps=10)
    assert found[0] == pytest.approx(1e-6)
    assert max(found) == pytest.approx(0.1, rel=0.03)
    assert found[-1] < 1e-4
    assert rates(config(epochs=10, lr=1e-6), steps=10)[0] == pytest.approx(1e-7)


def test_arguments_reach_the_optimizer(config: Make) -> None:
    momentum = create_optimizer(Small(), config(optimizer="nesterov", optimizer_args={"momentum": 0.8}))
    assert all(group["momentum"] == 0.8 and group["nesterov"] for group in momentum.param_groups)
    betas = create_optimizer(Small(), config(optimizer_args={"betas": [0.8, 0.95]}))
    assert betas.param_groups[0]["betas"] in ([0.8, 0.95], (0.8, 0.95))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adamv"}, "unknown optimizer 'adamv'; did you mean 'adam"),
        (
            {"optimizer_args": {"beta": 1}},
            "unknown argument of adamw in .*: 'beta'; did you mean 'betas'",
        ),
        ({"optimizer_args": {"momentum": 0.9}}, "unknown argument of adamw in optimizer_args: 'momentum'"),
        ({"optimizer_args": {"weight_decay": 0.9}}, "unknown argument of adamw"),
        (
            {"optimizer_args": {"eps": -1.0}},
            r"refuses optimizer_args=\{'eps': -1.0\}: Invalid epsilon",
        ),
    ],
)
def test_what_an_optimizer_cannot_use(config: Make, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_optimizer(Small(), config(**changes))


@pytest.mark.parametrize("optimizer", ["adamw", "nesterov"])
def test_one_kernel_updates_as_one_weight_after_the_other_does(config: Make, optimizer: str) -> None:
    weights = []
    for args in ({}, {"foreach": False}):
        torch.manual_seed(0)
        model = Small()
        update = create_optimizer(model, config(optimizer=optimizer, lr=0.1, optimizer_args=args))
        assert bool(update.defaults["fused"]) == (not args)
        for step in range(5):
            update.zero_grad()
            model(torch.full((2, 5, 4), step / 3)).square().sum().backward()
            update.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*weights, atol=1e-6)


def test_an_optimizer_without_such_a_kernel_does_without(config: Make) -> None:
    assert "fused" not in create_optimizer(Small(), config(optimizer="rmsproptf")).defaults
