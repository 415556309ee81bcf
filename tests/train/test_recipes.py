"""Every option of a recipe is applied: read back from the objects that a run builds."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import timm
import torch
import yaml
from timm.layers import DropPath
from torch import nn
from torch.nn import functional as F

from tests.train.test_initialize import save
from visualtokens.cli.parse import RECIPES as FOLDER
from visualtokens.cli.parse import parse
from visualtokens.cli.train import VERB
from visualtokens.data import generator
from visualtokens.data.transforms import Mix
from visualtokens.tasks.classify import ClassifyTraining
from visualtokens.tasks.classify.task import all_model_args
from visualtokens.tasks.task import Loading
from visualtokens.train import TrainConfig, train
from visualtokens.train.distributed import Team
from visualtokens.train.run import Run

NAMES = (
    *("vt_default", "vt_advanced", "deit", "deit_2x", "stvit_384_finetune", "paca_cifar100"),
    "pooled_normalized_qk",
    *("small_digits_paca", "small_digits_vt", "small_digits_vt_advanced"),
    *("small_cifar10_paca", "small_cifar10_vt"),
)
BY_NAME = {name: FOLDER / f"{name}.yaml" for name in NAMES}
RECIPES = list(BY_NAME.values())
DIGITS = [str(i) for i in range(10)]
STEPS = {256: 6, 1024: 2, 2048: 1, 512: 3, 64: 23}  # per epoch of 1,437 digits


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of models that some recipes start from or learn from."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "paca_vit_nano": save(root / "nano", "paca_vit_nano", classes=DIGITS),
        "paca_vit_b0": save(root / "b0", "paca_vit_b0", classes=DIGITS),
    }


def config_of(name: str, *changes: str) -> TrainConfig:
    """The recipe on digits, in 32 pixels, as the command line reads it."""
    given = ["--config", name, "--data", "digits", "--out", "run", "--device", "cpu"]
    config, _ = parse("train", "", VERB, [*given, "--workers", "0", *changes])
    return config  # type: ignore[no-any-return]


def run_of(config: TrainConfig) -> Run:
    return Run(config, device=torch.device("cpu"), team=Team(), progress=False)


def rates(run: Run) -> list[float]:
    """The learning rate of every step of the whole run."""
    found = []
    for step in range(run.config.epochs * len(run.train_loader)):
        run.learner.schedule.step_update(step)
        found.append(run.learner.lr)
    return found


def drop_paths(model: nn.Module) -> list[float]:
    return [module.drop_prob or 0.0 for module in model.modules() if isinstance(module, DropPath)]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_opens_with_command_hardware_hours_and_result(path: Path) -> None:
    head = path.read_text().split("\n\n")[0]
    comments = "\n".join(line for line in head.splitlines() if line.startswith("#"))
    program = "(torchrun --nproc_per_node=8 -m visualtokens.train|vtok train)"
    assert re.search(rf"^#   {program} --config {path.stem} ", comments, re.MULTILINE)
    for word in ("hardware", "hours", "published" if not path.stem.startswith("small") else "result"):
        assert re.search(rf"^# {word}\s+\S", comments, re.MULTILINE), word
    assert max(map(len, path.read_text().splitlines())) <= 120


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_key_of_a_recipe_is_an_option_with_that_value(path: Path) -> None:
    model = [] if "model" in yaml.safe_load(path.read_text()) else ["--model", "paca_vit_b0"]
    config = config_of(path.stem, *model)
    for key, value in yaml.safe_load(path.read_text()).items():
        if key not in ("data", "workers"):
            assert getattr(config, key) == value, key


def test_vt_default() -> None:
    run = run_of(config_of("vt_default", "--size", "32"))
    optimizer = run.learner.optimizer
    assert isinstance(optimizer, torch.optim.SGD)
    assert {(g["momentum"], g["nesterov"]) for g in optimizer.param_groups} == {(0.9, True)}
    assert {g["weight_decay"] for g in optimizer.param_groups} == {0.0, 4e-5}
    assert run.config.batch == 256
    assert rates(run) == pytest.approx([0.1 * 0.1 ** (step // (30 * 6)) for step in range(90 * 6)])
    task = run.training
    assert isinstance(task, ClassifyTraining)
    assert (task.mix, task.teacher, task.options.smoothing) == (None, None, 0)
    assert (task.augment.crop_area, task.augment.flip, task.augment.policy) == ((0.08, 1.0), 0.5, None)
    assert run.learner.ema is None
    assert timm.is_model("vt_resnet34")


def test_vt_advanced(checkpoints: dict[str, str]) -> None:
    run = run_of(config_of("vt_advanced", "--size", "32", "--teacher", checkpoints["paca_vit_nano"]))
    optimizer = run.learner.optimizer
    assert type(optimizer).__name__ == "RMSpropTF"
    assert {g["weight_decay"] for g in optimizer.param_groups} == {0.0, 4e-5}
    assert run.config.batch == 2048
    found = rates(run)  # one step is one epoch here
    assert found[:6] == pytest.approx([0.01 + 0.15 * epoch / 5 for epoch in range(6)])
    assert found[5:] == pytest.approx([0.16 * 0.9875 ** (epoch - 5) for epoch in range(5, 400)])
    task = run.training
    assert isinstance(task, ClassifyTraining)
    assert (task.augment.policy, task.options.smoothing) == ("original", 0.1)
    assert run.learner.ema is not None
    assert run.learner.ema.get_decay() == 0.99985
    assert max(drop_paths(run.learner.model)) == pytest.approx(0.1)
    assert {m.p for m in run.learner.model.modules() if isinstance(m, nn.Dropout)} == {0.2}
    assert_loss_weights(task, labels=0.2, teacher=0.8)
    assert run.config.sync_bn
    assert timm.is_model(config_of("vt_advanced").teacher)


def assert_loss_weights(task: ClassifyTraining, *, labels: float, teacher: float) -> None:
    """The loss is the stated mixture of cross-entropy and divergence from the teacher, both written out."""
    assert task.teacher is not None
    batch = next(iter(task.val_loader(Loading(batch=8))))
    model = task.model.eval()
    ours, theirs = model(batch.images).log_softmax(1), task.teacher(batch.images).log_softmax(1)
    smooth = 0.9 * F.one_hot(batch.labels, 10) + 0.1 / 10
    cross_entropy = -(smooth * ours).sum(1).mean()
    divergence = (theirs.exp() * (theirs - ours)).sum(1).mean()
    loss = task.loss(model, batch, rng=generator(0)).value
    torch.testing.assert_close(loss, labels * cross_entropy + teacher * divergence)
    assert not torch.isclose(cross_entropy, divergence)


def cosine(epochs: int, steps: int, *, lr: float, low: float, warmup: int, start: float) -> list[float]:
    rising, total = warmup * steps, epochs * steps
    rise = [start + (lr - start) * step / rising for step in range(rising)]
    return rise + [low + (lr - low) * (1 + math.cos(math.pi * s / total)) / 2 for s in range(rising, total)]


@pytest.mark.parametrize(("name", "init"), [("deit", False), ("deit_2x", True)])
def test_deit(checkpoints: dict[str, str], name: str, init: bool) -> None:
    started = ["--init", checkpoints["paca_vit_b0"]] if init else []
    run = run_of(config_of(name, "--model", "paca_vit_b0", *started))
    optimizer = run.learner.optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    assert {g["weight_decay"] for g in optimizer.param_groups} == {0.0, 0.05}
    expected = cosine(300, STEPS[1024], lr=1e-3, low=1e-5, warmup=5, start=1e-6)
    assert rates(run) == pytest.approx(expected)
    task = run.training
    assert isinstance(task, ClassifyTraining)
    assert (task.augment.policy, task.augment.erase) == ("rand-m9-mstd0.5-inc1", 0.25)
    assert (task.augment.crop_area, task.augment.flip) == ((0.08, 1.0), 0.5)
    assert isinstance(task.mix, Mix)
    mixup = task.mix.mixup
    assert (mixup.mixup_alpha, mixup.cutmix_alpha, mixup.label_smoothing) == (0.8, 1.0, 0.1)
    assert (mixup.mix_prob, mixup.switch_prob) == (1.0, 0.5)
    first = next(iter(run.train_loader._batches.batch_sampler))  # type: ignore[arg-type]
    assert [key.copy for key in first[:6]] == [0, 1, 2, 0, 1, 2]  # repeated augmentation
    assert max(drop_paths(run.learner.model)) == pytest.approx(0.1)
    assert run.learner.ema is None
    if init:
        loaded = timm.create_model(f"local-dir:{checkpoints['paca_vit_b0']}", pretrained=True).state_dict()
        assert all(torch.equal(w, loaded[n]) for n, w in run.learner.model.state_dict().items())


@pytest.mark.parametrize(
    ("model", "rate"),
    [
        ("stvit_small", 0.1),
        ("stvit_base", 0.4),
        ("stvit_large", 0.6),
        ("paca_vit_base", 0.5),
        ("pvt_v2_b2", 0.1),
    ],
)
def test_stochastic_depth_is_the_models(model: str, rate: float) -> None:
    config = config_of("deit", "--model", model)
    assert all_model_args(config)["drop_path_rate"] == rate


def test_stvit_384_finetune(checkpoints: dict[str, str]) -> None:
    config = config_of("stvit_384_finetune", "--model", "paca_vit_b0", "--init", checkpoints["paca_vit_b0"])
    run = run_of(config)
    assert (config.epochs, config.batch, run.training.preprocess.size) == (30, 512, (384, 384))  # type: ignore[attr-defined]
    expected = cosine(30, STEPS[512], lr=1e-5, low=1e-6, warmup=0, start=0)
    assert rates(run) == pytest.approx(expected)
    assert {g["weight_decay"] for g in run.learner.optimizer.param_groups} == {0.0, 1e-8}


def test_paca_cifar100() -> None:
    run = run_of(config_of("paca_cifar100", "--model", "paca_vit_b0_32"))
    task = run.training
    assert isinstance(task, ClassifyTraining)
    assert task.preprocess.size == (32, 32)
    assert (task.augment.shift, task.augment.flip, task.augment.crop_area) == (4, 0.5, None)
    assert (task.augment.policy, task.augment.erase) == ("rand-m9-mstd0.5-inc1", 0.25)
    assert rates(run) == pytest.approx(cosine(300, STEPS[256], lr=5e-4, low=1e-6, warmup=5, start=1e-6))


@pytest.mark.parametrize("name", [name for name in BY_NAME if name.startswith("small")])
def test_small_recipes_train(name: str, checkpoints: dict[str, str], few_digits: str, tmp_path: Path) -> None:
    """One epoch of a few digits: every part of the recipe runs."""
    changes = ["--data", few_digits, "--out", str(tmp_path / "run"), "--epochs", "1", "--warmup_epochs"]
    changes += ["1" if "warmup_lr" in BY_NAME[name].read_text() else "0"]
    if name == "small_digits_vt_advanced":
        changes += ["--teacher", checkpoints["paca_vit_nano"]]
    result = train(config_of(name, *changes))
    assert len(result.history) == 1
    assert result.skipped == 0
