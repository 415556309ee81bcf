"""One step, seen from inside a model that takes notes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.train.helpers import Make, a_batch, learner_of
from visualtokens.train import Diverged


class Notes(nn.Module):
    """A linear classifier of 2×2 images that keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(12, 10)
        self.images = self.logits = torch.empty(0)
        self.dropped: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.images, self.logits = x, self.linear(x.flatten(1))
        self.dropped.append(F.dropout(torch.ones(100), 0.5))
        return self.logits


class Root(nn.Module):
    """Finite forward, infinite slope at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.sqrt().expand(len(x), -1)


class Normed(nn.Sequential):
    """With running statistics, which a forward pass changes."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 10))


def images(count: int = 4, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(count, 3, 2, 2, generator=torch.Generator().manual_seed(count))


def test_loss_and_sums_are_those_before_the_step(config: Make) -> None:
    learner = learner_of(model := Notes(), config(), smoothing=0.3)
    labels = torch.arange(4)
    taken = learner.learn(a_batch(images()))
    assert taken.images == 4
    assert taken.loss / 4 == pytest.approx(F.cross_entropy(model.logits, labels, label_smoothing=0.3).item())
    assert taken.sums == {"accuracy": (model.logits.argmax(1) == labels).sum()}
    assert taken.problem is None


@pytest.mark.parametrize("bf16", [False, True])
def test_mixed_precision_only_where_asked_for(config: Make, bf16: bool) -> None:
    learner_of(model := Notes(), config(bf16=bf16)).learn(a_batch(images()))
    assert model.logits.dtype == (torch.bfloat16 if bf16 else torch.float32)
    assert model.linear.weight.dtype == torch.float32


@pytest.mark.parametrize("channels_last", [False, True])
def test_memory_order(config: Make, channels_last: bool) -> None:
    learner_of(model := Notes(), config(channels_last=channels_last)).learn(a_batch(images()))
    assert model.images.is_contiguous(memory_format=torch.channels_last) == channels_last


def test_every_step_has_its_learning_rate(config: Make) -> None:
    learner = learner_of(Notes(), config(epochs=1, lr=0.1, min_lr=0.0, warmup_epochs=0))
    rates = []
    for _ in range(4):
        learner.learn(a_batch(images()))
        rates.append(learner.lr)
    assert rates == pytest.approx([0.1, 0.1 * (2 + 2**0.5) / 4, 0.05, 0.1 * (2 - 2**0.5) / 4])


def test_randomness_depends_on_seed_and_step_only(config: Make) -> None:
    def dropped(seed: int, *, first: int = 0) -> list[Tensor]:
        learner = learner_of(model := Notes(), config(seed=seed))
        learner.step = first
        torch.rand(7)  # whatever was drawn before must not matter
        for _ in range(3):
            learner.learn(a_batch(images()))
        return model.dropped

    one, two, other = dropped(0), dropped(0, first=1), dropped(1)
    assert torch.equal(one[1], two[0])
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one[0], other[0])


@pytest.mark.parametrize("pieces", [2, 3, 4])
def test_accumulation_gives_the_gradient_of_the_whole_batch(config: Make, pieces: int) -> None:
    whole, pieced = learner_of(Notes(), config()), learner_of(model := Notes(), config(accumulate=pieces))
    taken = [learner.learn(a_batch(images(11))) for learner in (whole, pieced)]
    assert len(model.dropped) == pieces
    assert taken[0].loss == pytest.approx(taken[1].loss, rel=1e-6)
    assert taken[0].sums == taken[1].sums
    for a, b in zip(whole.model.parameters(), pieced.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


def test_more_pieces_than_images(config: Make) -> None:
    learner_of(model := Notes(), config(accumulate=8)).learn(a_batch(images(3)))
    assert len(model.dropped) == 3


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_clipping_bounds_the_gradient(config: Make, clip: float) -> None:
    learner = learner_of(nn.Sequential(nn.Flatten(), nn.Linear(12, 10)), config(clip=clip))
    learner.learn(a_batch(images(scale=100)))
    norm = torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]).norm()
    assert norm <= 0.0101 if clip else norm > 1


def test_the_average_follows_by_its_decay(config: Make) -> None:
    learner = learner_of(Notes(), config(ema=0.75))
    expected = learner.model.linear.weight.detach().clone()  # type: ignore[union-attr]
    for _ in range(3):
        learner.learn(a_batch(images()))
        expected = 0.75 * expected + 0.25 * learner.model.linear.weight.detach()  # type: ignore[union-attr]
    average = learner.best_weights.linear.weight  # type: ignore[union-attr]
    torch.testing.assert_close(average, expected)
    assert not torch.equal(average, learner.model.linear.weight)  # type: ignore[union-attr]
    assert learner_of(model := Notes(), config()).best_weights is model


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(config: Make) -> None:
    learner = learner_of(Root(), config(ema=0.5))
    taken = learner.learn(a_batch(images()))
    assert taken.problem == f"the norm of the gradient is inf at step 1 (learning rate {learner.lr:.2g})"
    assert torch.equal(learner.model.weight, torch.zeros(10))  # type: ignore[arg-type]
    assert learner.optimizer.state_dict()["state"] == {}
    assert (learner.step, learner.skipped, learner.skipped_in_a_row) == (1, 1, 1)


def test_a_loss_that_is_not_finite_leaves_running_statistics_alone(config: Make) -> None:
    learner = learner_of(Normed(), config(ema=0.5))
    learner.learn(a_batch(images()))
    before = {name: w.clone() for name, w in learner.model.state_dict().items()}
    average = {name: w.clone() for name, w in learner.best_weights.state_dict().items()}
    taken = learner.learn(a_batch(images() * torch.nan))
    assert taken.problem is not None
    assert taken.problem.startswith("the loss is nan at step 2 ")
    assert all(torch.equal(w, before[name]) for name, w in learner.model.state_dict().items())
    assert all(torch.equal(w, average[name]) for name, w in learner.best_weights.state_dict().items())
    assert learner.learn(a_batch(images())).problem is None
    assert (learner.skipped, learner.skipped_in_a_row) == (1, 0)


def test_too_many_skipped_steps_in_a_row_end_it(config: Make) -> None:
    learner = learner_of(Normed(), config(max_bad_steps=3))
    bad, good = a_batch(images() * torch.inf), a_batch(images())
    for batch in (bad, bad, good, bad, bad):
        learner.learn(batch)
    with pytest.raises(Diverged, match=r"at step 6 .*the last of 3 such steps in a row.*try a lower lr"):
        learner.learn(bad)
    assert learner.skipped == 5
    learner.require_finite_weights()


def test_weights_that_are_not_finite_are_named(config: Make) -> None:
    learner = learner_of(Notes(), config())
    with torch.no_grad():
        learner.model.linear.bias[3] = torch.inf  # type: ignore[union-attr, index, operator]
    with pytest.raises(Diverged, match=r"linear\.bias is not finite after step 0 .* was not saved"):
        learner.require_finite_weights()


@pytest.mark.slow
def test_a_compiled_model_learns_the_same(config: Make) -> None:
    plain, compiled = learner_of(Notes(), config()), learner_of(Notes(), config(compile=True))
    for learner in (plain, compiled):
        for _ in range(2):
            learner.learn(a_batch(images()))
    for a, b in zip(plain.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert list(compiled.model.state_dict()) == list(plain.model.state_dict())
