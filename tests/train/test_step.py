"""Training steps on models that record what they see; optimizer and schedule."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.train.helpers import Make, a_batch, learner_of
from visualtokens.errors import UserError
from visualtokens.tasks.timm_models import build_model
from visualtokens.train import Diverged, TrainConfig
from visualtokens.train.step import create_optimizer, create_schedule


class Recorder(nn.Module):
    """A linear classifier of 2×2 images that records its input, logits and dropout masks."""

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
    """Finite output, infinite gradient at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.sqrt().expand(len(x), -1)


class Normed(nn.Sequential):
    """Has running statistics, which a forward pass changes."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 10))


def images(count: int = 4, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(count, 3, 2, 2, generator=torch.Generator().manual_seed(count))


def test_loss_and_sums_are_from_before_the_update(config: Make) -> None:
    learner = learner_of(model := Recorder(), config(), smoothing=0.3)
    labels = torch.arange(4)
    result = learner.learn(a_batch(images()))
    assert result.images == 4
    assert result.loss / 4 == pytest.approx(F.cross_entropy(model.logits, labels, label_smoothing=0.3).item())
    assert result.sums == {"accuracy": (model.logits.argmax(1) == labels).sum()}
    assert result.problem is None


@pytest.mark.parametrize("bf16", [False, True])
def test_bf16_option(config: Make, bf16: bool) -> None:
    learner_of(model := Recorder(), config(bf16=bf16)).learn(a_batch(images()))
    assert model.logits.dtype == (torch.bfloat16 if bf16 else torch.float32)
    assert model.linear.weight.dtype == torch.float32


@pytest.mark.parametrize("channels_last", [False, True])
def test_channels_last_option(config: Make, channels_last: bool) -> None:
    learner_of(model := Recorder(), config(channels_last=channels_last)).learn(a_batch(images()))
    assert model.images.is_contiguous(memory_format=torch.channels_last) == channels_last


def test_every_step_sets_its_learning_rate(config: Make) -> None:
    learner = learner_of(Recorder(), config(epochs=1, lr=0.1, min_lr=0.0, warmup_epochs=0))
    rates = []
    for _ in range(4):
        learner.learn(a_batch(images()))
        rates.append(learner.lr)
    assert rates == pytest.approx([0.1, 0.1 * (2 + 2**0.5) / 4, 0.05, 0.1 * (2 - 2**0.5) / 4])


def test_dropout_depends_on_seed_and_step_only(config: Make) -> None:
    def dropped(seed: int, *, first: int = 0) -> list[Tensor]:
        learner = learner_of(model := Recorder(), config(seed=seed))
        learner.step = first
        torch.rand(7)  # earlier draws must not matter
        for _ in range(3):
            learner.learn(a_batch(images()))
        return model.dropped

    one, two, other = dropped(0), dropped(0, first=1), dropped(1)
    assert torch.equal(one[1], two[0])
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one[0], other[0])


@pytest.mark.parametrize("pieces", [2, 3])
def test_accumulation_gives_the_gradient_of_the_whole_batch(config: Make, pieces: int) -> None:
    whole, pieced = (
        learner_of(Recorder(), config()),
        learner_of(model := Recorder(), config(accumulate=pieces)),
    )
    result = [learner.learn(a_batch(images(11))) for learner in (whole, pieced)]
    assert len(model.dropped) == pieces
    assert result[0].loss == pytest.approx(result[1].loss, rel=1e-6)
    assert result[0].sums == result[1].sums
    for a, b in zip(whole.model.parameters(), pieced.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


def test_accumulation_with_fewer_images_than_parts(config: Make) -> None:
    learner_of(model := Recorder(), config(accumulate=8)).learn(a_batch(images(3)))
    assert len(model.dropped) == 3


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_clip_bounds_the_gradient_norm(config: Make, clip: float) -> None:
    learner = learner_of(nn.Sequential(nn.Flatten(), nn.Linear(12, 10)), config(clip=clip))
    learner.learn(a_batch(images(scale=100)))
    norm = torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]).norm()
    assert norm <= 0.0101 if clip else norm > 1


def test_ema_follows_its_decay(config: Make) -> None:
    learner = learner_of(Recorder(), config(ema=0.75))
    expected = learner.model.linear.weight.detach().clone()  # type: ignore[union-attr]
    for _ in range(3):
        learner.learn(a_batch(images()))
        expected = 0.75 * expected + 0.25 * learner.model.linear.weight.detach()  # type: ignore[union-attr]
    average = learner.eval_model.linear.weight  # type: ignore[union-attr]
    torch.testing.assert_close(average, expected)
    assert not torch.equal(average, learner.model.linear.weight)  # type: ignore[union-attr]
    assert learner_of(model := Recorder(), config()).eval_model is model


def test_infinite_gradient_skips_the_update(config: Make) -> None:
    learner = learner_of(Root(), config(ema=0.5))
    result = learner.learn(a_batch(images()))
    assert result.problem == f"the norm of the gradient is inf at step 1 (learning rate {learner.lr:.2g})"
    assert torch.equal(learner.model.weight, torch.zeros(10))  # type: ignore[arg-type]
    assert learner.optimizer.state_dict()["state"] == {}
    assert (learner.step, learner.skipped, learner.skipped_in_a_row) == (1, 1, 1)


def test_nan_loss_restores_running_statistics(config: Make) -> None:
    learner = learner_of(Normed(), config(ema=0.5))
    learner.learn(a_batch(images()))
    before = {name: w.clone() for name, w in learner.model.state_dict().items()}
    average = {name: w.clone() for name, w in learner.eval_model.state_dict().items()}
    result = learner.learn(a_batch(images() * torch.nan))
    assert result.problem is not None
    assert result.problem.startswith("the loss is nan at step 2 ")
    assert all(torch.equal(w, before[name]) for name, w in learner.model.state_dict().items())
    assert all(torch.equal(w, average[name]) for name, w in learner.eval_model.state_dict().items())
    assert learner.learn(a_batch(images())).problem is None
    assert (learner.skipped, learner.skipped_in_a_row) == (1, 0)


def test_too_many_skipped_steps_in_a_row_raise(config: Make) -> None:
    learner = learner_of(Normed(), config(max_bad_steps=3))
    bad, good = a_batch(images() * torch.inf), a_batch(images())
    for batch in (bad, bad, good, bad, bad):
        learner.learn(batch)
    with pytest.raises(Diverged, match=r"at step 6 .*the last of 3 such steps in a row.*try a lower lr"):
        learner.learn(bad)
    assert learner.skipped == 5
    learner.require_finite_weights()


def test_weights_that_are_not_finite_raise(config: Make) -> None:
    learner = learner_of(Recorder(), config())
    with torch.no_grad():
        learner.model.linear.bias[3] = torch.inf  # type: ignore[union-attr, index, operator]
    with pytest.raises(Diverged, match=r"linear\.bias is not finite after step 0 .* was not saved"):
        learner.require_finite_weights()


@pytest.mark.slow
def test_compiled_model_trains_equally(config: Make) -> None:
    plain, compiled = learner_of(Recorder(), config()), learner_of(Recorder(), config(compile=True))
    for learner in (plain, compiled):
        for _ in range(2):
            learner.learn(a_batch(images()))
    for a, b in zip(plain.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert list(compiled.model.state_dict()) == list(plain.model.state_dict())


# Optimizer and schedule.


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


def test_no_weight_decay_on_biases_norms_and_exempted_parameters(config: Make) -> None:
    decay = by_name(Small(), config(weight_decay=0.3), "weight_decay")
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


def test_layer_decay_lowers_the_rate_of_earlier_layers(config: Make) -> None:
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


@pytest.mark.parametrize("warmup", [0.0, 0.5, 2.0])
def test_cosine_schedule_with_warm_up(config: Make, warmup: float) -> None:
    start = {"warmup_lr": 0.02} if warmup else {}
    settings = config(epochs=4, lr=0.1, min_lr=0.01, warmup_epochs=warmup, **start)
    for step, rate in enumerate(rates(settings, steps=6)):
        rising = warmup * 6
        if step < rising:
            expected = 0.02 + (0.1 - 0.02) * step / rising
        else:
            expected = 0.01 + (0.1 - 0.01) * (1 + math.cos(math.pi * step / 24)) / 2
        assert rate == pytest.approx(expected), step


@pytest.mark.parametrize("power", [None, 0.9, 2.0])
def test_polynomial_schedule_is_linear_by_default(config: Make, power: float | None) -> None:
    settings = config(
        epochs=4, lr=0.1, min_lr=0.01, schedule="poly", power=power, warmup_epochs=0.5, warmup_lr=0.0
    )
    found = rates(settings, steps=6)
    assert found[:3] == pytest.approx([0.1 * step / 3 for step in range(3)])
    expected = [0.01 + 0.09 * (1 - step / 24) ** (power or 1.0) for step in range(3, 24)]
    assert found[3:] == pytest.approx(expected)


def test_step_decays_count_from_the_end_of_the_warm_up(config: Make) -> None:
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


def test_step_decays_at_listed_epochs(config: Make) -> None:
    settings = config(
        epochs=12, lr=0.1, schedule="step", decay_epochs=[8.0, 11.0], warmup_epochs=0.5, warmup_lr=0.0
    )
    found = rates(settings, steps=4)
    assert found[:2] == pytest.approx([0.0, 0.05])
    assert found[2:] == pytest.approx([0.1] * 30 + [0.01] * 12 + [0.001] * 4)


def test_default_schedule_starts_and_ends_near_zero(config: Make) -> None:
    found = rates(config(epochs=10, lr=0.1), steps=10)
    assert found[0] == pytest.approx(1e-6)
    assert max(found) == pytest.approx(0.1, rel=0.03)
    assert found[-1] < 1e-4
    assert rates(config(epochs=10, lr=1e-6), steps=10)[0] == pytest.approx(1e-7)


def test_optimizer_args_reach_the_optimizer(config: Make) -> None:
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
def test_invalid_optimizer_options_are_refused(config: Make, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_optimizer(Small(), config(**changes))


@pytest.mark.parametrize("optimizer", ["adamw", "nesterov"])
def test_fused_update_equals_the_loop(config: Make, optimizer: str) -> None:
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


def test_optimizer_without_a_fused_kernel(config: Make) -> None:
    assert "fused" not in create_optimizer(Small(), config(optimizer="rmsproptf")).defaults
