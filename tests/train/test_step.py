"""One step, seen from inside a model that takes notes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.train import Diverged, TrainConfig
from visualtokens.train.step import Learner

Make = Callable[..., TrainConfig]
CPU = torch.device("cpu")


class Notes(nn.Module):
    """A linear classifier of 2×2 images that keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(12, 10)
        self.images = self.logits = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.images, self.logits = x, self.linear(x.flatten(1))
        return self.logits


def test_the_loss_is_smoothed_as_configured(config: Make) -> None:
    learner = Learner(model := Notes(), config(label_smoothing=0.3), device=CPU, steps=1)
    labels = torch.arange(4)
    loss, correct = learner.learn(torch.randn(4, 3, 2, 2), labels)
    assert loss == pytest.approx(F.cross_entropy(model.logits, labels, label_smoothing=0.3).item())
    assert loss != pytest.approx(F.cross_entropy(model.logits, labels).item())
    assert correct == (model.logits.argmax(1) == labels).sum()


@pytest.mark.parametrize("bf16", [False, True])
def test_mixed_precision_only_where_asked_for(config: Make, bf16: bool) -> None:
    learner = Learner(model := Notes(), config(bf16=bf16), device=CPU, steps=1)
    learner.learn(torch.randn(4, 3, 2, 2), torch.arange(4))
    assert model.logits.dtype == (torch.bfloat16 if bf16 else torch.float32)
    assert model.linear.weight.dtype == torch.float32


@pytest.mark.parametrize("channels_last", [False, True])
def test_memory_order(config: Make, channels_last: bool) -> None:
    learner = Learner(model := Notes(), config(channels_last=channels_last), device=CPU, steps=1)
    learner.learn(torch.randn(4, 3, 2, 2), torch.arange(4))
    assert model.images.is_contiguous(memory_format=torch.channels_last) == channels_last


def test_every_step_has_its_learning_rate(config: Make) -> None:
    learner = Learner(Notes(), config(epochs=1, lr=0.1, min_lr=0.0, warmup_epochs=0), device=CPU, steps=4)
    rates = []
    for _ in range(4):
        learner.learn(torch.randn(4, 3, 2, 2), torch.arange(4))
        rates.append(learner.lr)
    assert rates == pytest.approx([0.1, 0.1 * (2 + 2**0.5) / 4, 0.05, 0.1 * (2 - 2**0.5) / 4])


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(config: Make) -> None:
    class Root(nn.Module):
        """Finite forward, infinite slope at 0."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(10))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight.sqrt().expand(len(x), -1)

    learner = Learner(Root(), config(), device=torch.device("cpu"), steps=3)
    with pytest.raises(Diverged, match="norm of the gradient"):
        learner.learn(torch.zeros(4, 3, 8, 8), torch.arange(4))
    assert torch.equal(learner.model.weight, torch.zeros(10))


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_clipping_bounds_the_gradient(config: Make, clip: float) -> None:
    learner = Learner(
        nn.Sequential(nn.Flatten(), nn.Linear(12, 10)), config(clip=clip), device=torch.device("cpu"), steps=1
    )
    learner.learn(100 * torch.randn(4, 3, 2, 2), torch.arange(4))
    norm = torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]).norm()
    assert norm <= 0.0101 if clip else norm > 1
