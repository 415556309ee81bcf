"""Every option of the segmentation and detection recipes is applied."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path

import pytest
import timm
import torch
import yaml
from timm.layers import DropPath
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from visualtokens.cli.parse import RECIPES as FOLDER
from visualtokens.cli.parse import parse
from visualtokens.cli.train import VERB
from visualtokens.tasks.detect.task import DetectTraining
from visualtokens.tasks.freeze import sync_trained_norms
from visualtokens.tasks.segment.task import SegmentTraining
from visualtokens.train import TrainConfig
from visualtokens.train.distributed import Team
from visualtokens.train.run import Run
from visualtokens.train.step import Learner

NAMES = (
    *("vt_fpn_cocostuff", "vt_fpn_lip", "upernet_ade20k"),
    *("mask_rcnn_1x", "mask_rcnn_3x_ms", "cascade_mask_rcnn_3x"),
)
SCENES = 4000  # to train
STVIT = ("--model_args.backbone", "stvit_small")


def config_of(name: str, *changes: str) -> TrainConfig:
    """The recipe on digit scenes, as the command line reads it; nothing is fetched."""
    given = ["--config", name, "--data", "digit_scenes", "--out", "run"]
    if name.startswith("vt_fpn") and "--init" not in changes:
        given += ["--init", "resnet50_stride_first.pth"]
    config, _ = parse("train", "", VERB, [*given, "--device", "cpu", "--workers", "0", *changes])
    return config  # type: ignore[no-any-return]


def run_of(config: TrainConfig) -> Run:
    return Run(config, device=torch.device("cpu"), team=Team(), progress=False)


def rates(run: Run) -> list[float]:
    """The learning rate at the start of every epoch."""
    steps = len(run.train_loader)
    found = []
    for epoch in range(run.config.epochs):
        run.learner.schedule.step_update(epoch * steps)
        found.append(run.learner.lr)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_opens_with_command_hardware_hours_and_result(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    command = rf"^#   torchrun --nproc_per_node=8 -m visualtokens.train --config {name} "
    assert re.search(command, text, re.MULTILINE)
    for word in ("hardware", "hours", "published"):
        assert re.search(rf"^# {word}\s+\S", text, re.MULTILINE), word
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_a_recipe_is_an_option_with_that_value(name: str) -> None:
    config = config_of(name)
    for key, value in yaml.safe_load((FOLDER / f"{name}.yaml").read_text()).items():
        if key != "workers":
            assert getattr(config, key) == value, key


@pytest.mark.parametrize(
    ("name", "batch", "lr", "decay", "size"),
    [("vt_fpn_cocostuff", 32, 0.04, 1e-4, 800), ("vt_fpn_lip", 96, 0.01, 5e-4, 473)],
)
def test_vt_fpn(name: str, batch: int, lr: float, decay: float, size: int, tmp_path: Path) -> None:
    weights, narrow = tmp_path / "resnet.pth", [8, 8, 8, 8]
    torch.save(timm.create_model("resnet26", channels=narrow).state_dict(), weights)
    small = ("--model_args.backbone", "resnet26", "--model_args.backbone_args.channels", str(narrow))
    run = run_of(config_of(name, *small, "--init", str(weights)))
    _assert_detectron2_backbone(run.learner)
    assert (run.config.batch, run.config.sync_bn) == (batch, True)
    assert len(run.train_loader) == math.ceil(SCENES / batch)
    optimizer = run.learner.optimizer
    assert isinstance(optimizer, torch.optim.SGD)
    assert {g["momentum"] for g in optimizer.param_groups} == {0.9}
    assert {g["weight_decay"] for g in optimizer.param_groups} == {0.0, decay}
    assert max(rates(run)) == pytest.approx(lr, rel=0.02)
    task = run.training
    assert isinstance(task, SegmentTraining)
    assert (task.preprocess.size, task.options.smoothing, task.augment.flip) == ((size, size), 0, 0.5)


def _assert_detectron2_backbone(learner: Learner) -> None:
    """Stride first; stem, one stage and BatchNorm of the backbone frozen; SyncBatchNorm in the head alone."""
    learner.train_mode()
    names = {name for name, p in learner.model.named_parameters() if p.requires_grad}
    body = learner.model.backbone.body
    assert body.layer2[0].conv1.stride == (2, 2)
    assert body.layer2[0].conv2.stride == (1, 1)
    assert not any(".conv1.weight" in name and ".layer" not in name for name in names)
    assert not any(".layer1." in name or ".bn" in name for name in names)
    assert "backbone.body.layer2.0.conv1.weight" in names
    norms = [m for m in learner.model.modules() if isinstance(m, _BatchNorm)]
    assert {m.training for m in body.modules() if isinstance(m, _BatchNorm)} == {False}
    synced = sync_trained_norms(copy.deepcopy(learner.model))
    kinds = {name: type(m) for name, m in synced.named_modules() if isinstance(m, _BatchNorm)}
    assert len(kinds) == len(norms)
    for name, kind in kinds.items():
        assert (kind is nn.SyncBatchNorm) == (not name.startswith("backbone.")), name


def test_upernet() -> None:
    run = run_of(config_of("upernet_ade20k", *STVIT))
    assert rates(run)[2:] == pytest.approx([6e-5 * (1 - epoch / 127) for epoch in range(2, 127)])
    task = run.training
    assert isinstance(task, SegmentTraining)
    assert isinstance(run.learner.optimizer, torch.optim.AdamW)
    assert (task.preprocess.size, task.options.auxiliary) == ((512, 512), 0.4)
    assert task.model.auxiliary is not None
    # 20,210 images in batches of 16, for 160,000 steps
    assert run.config.epochs == round(160_000 / math.ceil(20_210 / 16))
    base = config_of("upernet_ade20k").drop_path
    assert isinstance(base, dict)
    assert base["stvit_base*"] == 0.3


@pytest.mark.parametrize(
    ("name", "sides", "falls"),
    [
        ("mask_rcnn_1x", (800,), (8, 11)),
        ("mask_rcnn_3x_ms", tuple(range(480, 801, 32)), (27, 33)),
        ("cascade_mask_rcnn_3x", tuple(range(480, 801, 32)), (27, 33)),
    ],
)
def test_detectors(name: str, sides: tuple[int, ...], falls: tuple[int, int]) -> None:
    run = run_of(config_of(name, *STVIT))
    task = run.training
    assert isinstance(task, DetectTraining)
    assert (task.sizing.short, task.sizing.long, task.sizing.flip) == (sides, 1333, 0.5)
    assert (task.model.transform.min_size, task.model.transform.max_size) == ((800,), 1333)
    assert isinstance(run.learner.optimizer, torch.optim.AdamW)
    assert {g["weight_decay"] for g in run.learner.optimizer.param_groups} == {0.0, 0.05}
    expected = [1e-4 * 0.1 ** sum(epoch >= fall for fall in falls) for epoch in range(run.config.epochs)]
    assert rates(run)[1:] == pytest.approx(expected[1:])
    drops = [m.drop_prob or 0.0 for m in task.model.modules() if isinstance(m, DropPath)]
    assert max(drops) == pytest.approx(0.1)
