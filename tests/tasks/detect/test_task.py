"""Detection training: options, initial weights and whole runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.squares import CLASSES, write_squares
from tests.train.helpers import dies_at_evaluation
from visualtokens.checkpoint import load
from visualtokens.errors import UserError
from visualtokens.files import read_config, read_weights
from visualtokens.tasks.detect.models import DETECTORS
from visualtokens.tasks.task import get_task, open_training
from visualtokens.train import TrainConfig, train

BODY = dict(channels=[8, 16, 16, 16])
ARGS: dict[str, Any] = dict(backbone="resnet18", backbone_args=BODY, width=16, hidden=32, regions=16)


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write_squares(tmp_path / "data")


def config(data: str, out: Path | str, **options: Any) -> TrainConfig:
    given: dict[str, Any] = dict(
        task="detect", model="mask_rcnn", model_args=ARGS, size=64, batch=4, epochs=2, lr=2e-3, augment="none"
    )
    return TrainConfig(data=data, out=str(out), **(given | options))


@pytest.mark.parametrize("detector", DETECTORS)
def test_run_saves_a_detector(data: str, tmp_path: Path, detector: str) -> None:
    result = train(config(data, tmp_path / "run", model=detector), progress=False)
    assert (result.score, result.classes) == ("box_ap", CLASSES)
    kinds = ("box", "mask") if "mask" in detector else ("box",)
    assert set(result.metrics) == {f"{kind}_ap{at}" for kind in kinds for at in ("", "50", "75")}
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    first = result.history[0]
    parts = [value for name, value in first.items() if name.startswith("train_")]
    assert sum(parts) == pytest.approx(first["loss"], rel=1e-4)
    checkpoint = load(tmp_path / "run")
    assert (checkpoint.classes, checkpoint.model.training) == (CLASSES, False)
    with torch.inference_mode():
        (found,) = checkpoint.model([torch.rand(3, 64, 80)])
    assert found["boxes"].shape[1] == 4
    other = get_task("detect").resize(checkpoint, 96).model.transform
    assert (other.min_size, other.max_size) == ((96,), 160)


@pytest.mark.parametrize("detector", ["mask_rcnn", "faster_rcnn"])
def test_a_missing_library_is_told_before_the_first_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, detector: str
) -> None:
    """Boxes need it only for the evaluation at the end of the epoch, and these masks as well."""
    monkeypatch.setitem(sys.modules, "faster_coco_eval.core", None)
    for function in (
        lambda: open_training(config("digit_scenes:64x64", tmp_path / "run", model=detector)),
        lambda: get_task("detect").open_data(mock.Mock(), "digit_scenes:64x64", "val"),
    ):
        with pytest.raises(UserError, match=r"install it with: pip install 'visualtokens\[detect\]'"):
            function()


@pytest.mark.slow
def test_squares_are_learned(data: str, tmp_path: Path) -> None:
    result = train(config(data, tmp_path / "run", epochs=40), progress=False)
    assert result.metrics["box_ap50"] > 0.8
    assert result.metrics["mask_ap50"] > 0.8


def test_interrupted_run_resumes(data: str, tmp_path: Path) -> None:
    whole = train(config(data, tmp_path / "whole"), progress=False)
    task = type(open_training(config(data, tmp_path)))
    with dies_at_evaluation(task, 2):
        train(config(data, tmp_path / "parts"), progress=False)
    again = train(config(data, tmp_path / "parts", resume="auto"), progress=False)
    assert [r["loss"] for r in again.history] == [r["loss"] for r in whole.history]
    first, second = (read_weights(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_broken_annotation_is_reported_by_file_image_and_field(data: str, tmp_path: Path) -> None:
    file = tmp_path / "data/annotations/instances_train2017.json"
    document = json.loads(file.read_text())
    document["annotations"][3]["bbox"] = [1, 2, 3]
    file.write_text(json.dumps(document))
    with pytest.raises(UserError, match=rf"{file.name}.*image 2.*bbox"):
        open_training(config(data, tmp_path))


def test_init_from_a_classifier_and_from_a_detector(data: str, digits: str, tmp_path: Path) -> None:
    folder = tmp_path / "classifier"
    train(
        TrainConfig(
            model="resnet18", model_args=BODY, data=digits, out=str(folder), epochs=1, size=32, batch=64
        ),
        progress=False,
    )
    learned = read_weights(folder)
    model: Any = open_training(config(data, tmp_path, init=str(folder))).model
    for name, weight in model.backbone.body.body.state_dict().items():
        assert torch.equal(weight, learned[name])

    train(config(data, tmp_path / "first", epochs=1), progress=False)
    first = read_weights(tmp_path / "first")
    same = open_training(config(data, tmp_path, init=str(tmp_path / "first"))).model.state_dict()
    assert all(torch.equal(first[name], same[name]) for name in first)
    for split in ("train", "val"):
        file = tmp_path / f"data/annotations/instances_{split}2017.json"
        file.write_text(file.read_text().replace('"bright"', '"light"'))
    other = open_training(config(data, tmp_path, init=str(tmp_path / "first"))).model.state_dict()
    differ = {name for name in first if not torch.equal(first[name], other[name])}
    assert differ
    assert all("_predictor." in name for name in differ)

    wrong = config(data, tmp_path, init=str(folder), model_args=ARGS | dict(backbone_args={}))
    with pytest.raises(UserError, match=r"init: the weights in .* do not fit 'resnet18', so none was loaded"):
        open_training(wrong)


def test_options_reach_the_detector(data: str, tmp_path: Path) -> None:
    args = ARGS | dict(backbone="convnext_atto", backbone_args={})
    task = open_training(config(data, tmp_path, model_args=args, drop_path={"convnext*": 0.3}))
    body = dict(backbone_args={"drop_path_rate": 0.3})
    assert task.describe()["model_args"] == args | body | dict(short=64, long=107)
    sizing = open_training(config(data, tmp_path, size=200, augment="multiscale")).sizing
    assert (sizing.short, sizing.long, sizing.flip) == ((136, 168, 200), 333, 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(mixup=0.8), "mixup=0.8 has no effect with task=detect"),
        (dict(loss_args={"auxiliary": 1}), "loss_args=.* has no effect with task=detect"),
        (dict(model="mask_rnn"), "unknown detector 'mask_rnn'; did you mean 'mask_rcnn'"),
        (dict(model_args={}), "needs a backbone; give one: --model_args.backbone"),
        (dict(model_args=ARGS | dict(short=64)), "size and model_args.short are the same option"),
        (dict(augment="imagenet"), "unknown augmentation of detection 'imagenet'"),
        (dict(data="folder:x"), "'folder:x' is for --task classify"),
    ],
)
def test_wrong_options_are_refused(data: str, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_training(config(options.pop("data", data), tmp_path, **options))


def test_checkpoint_cannot_ask_for_pretrained_weights(data: str, tmp_path: Path) -> None:
    train(config(data, tmp_path / "run", epochs=1), progress=False)
    file = tmp_path / "run/config.json"
    document = read_config(tmp_path / "run")
    document["model_args"]["pretrained"] = True
    file.write_text(json.dumps(document))
    with pytest.raises(UserError, match="model_args may not hold 'pretrained'"):
        load(tmp_path / "run")
