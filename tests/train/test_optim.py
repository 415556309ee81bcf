from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from visualtokens.train import TrainConfig
from visualtokens.train.build import build_model
from visualtokens.train.optim import create_optimizer, create_schedule


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


def decay_by_name(model: nn.Module, config: TrainConfig) -> dict[str, float]:
    names = {id(p): name for name, p in model.named_parameters()}
    groups = create_optimizer(model, config).param_groups
    return {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}


def test_biases_norms_and_exempted_parameters_do_not_decay(config: Callable[..., TrainConfig]) -> None:
    decay = decay_by_name(Small(), config(weight_decay=0.3))
    assert decay == {
        "linear.weight": 0.3,
        "linear.bias": 0.0,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "position": 0.0,
    }


def test_every_parameter_of_a_real_model_is_trained(config: Callable[..., TrainConfig]) -> None:
    model = build_model("paca_vit_nano", classes=3, model_args={})
    decay = decay_by_name(model, config(weight_decay=0.3))
    assert decay.keys() == dict(model.named_parameters()).keys()
    assert {decay[name] for name, p in model.named_parameters() if p.ndim == 1} == {0.0}


@pytest.mark.parametrize("warmup", [0.0, 0.5, 1.0, 2.0])
def test_learning_rate_of_every_step(config: Callable[..., TrainConfig], warmup: float) -> None:
    settings = config(epochs=4, lr=0.1, min_lr=0.01, warmup_epochs=warmup)
    steps, total = 6, 24
    optimizer = create_optimizer(Small(), settings)
    schedule = create_schedule(optimizer, settings, steps=steps)
    for step in range(total):
        schedule.step_update(step)
        rising = warmup * steps
        if step < rising:
            expected = 0.01 + (0.1 - 0.01) * step / rising
        else:
            expected = 0.01 + (0.1 - 0.01) * (1 + math.cos(math.pi * step / total)) / 2
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(expected), step
