"""Training runs of segmentation, by the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.helpers import dies_at_evaluation
from visualtokens.checkpoint import read_config, read_weights
from visualtokens.errors import UserError
from visualtokens.tasks.segment.task import rebuild
from visualtokens.train import TrainConfig, train
from visualtokens.train.segment import open_segment

BACKBONE = dict(backbone="resnet18", backbone_args=dict(channels=[8, 8, 8, 8]))
ARGS = BACKBONE | dict(head_args=dict(dim=8, width=8))


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Twelve images to learn from, two to judge: a bright square on dark ground."""
    import numpy as np
    from PIL import Image

    (tmp_path / "data").mkdir()
    (tmp_path / "data/classes.txt").write_text("ground\nsquare\n")
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 2)):
        for folder in ("images", "masks"):
            (tmp_path / "data" / folder / split).mkdir(parents=True)
        for i in range(count):
            mask = np.zeros((40, 48), np.uint8)
            top, left = rng.integers(0, 20, 2)
            mask[top : top + 18, left : left + 18] = 1
            pixels = np.clip(60 + 120 * mask[..., None] + rng.normal(0, 10, (40, 48, 3)), 0, 255).astype(
                np.uint8
            )
            Image.fromarray(pixels).save(tmp_path / f"data/images/{split}/{i}.png")
            Image.fromarray(mask).save(tmp_path / f"data/masks/{split}/{i}.png")
    return f"masks:{tmp_path / 'data'}"


def config(data: str, out: Path | str, **options: Any) -> TrainConfig:
    given: dict[str, Any] = dict(
        task="segment", model="fpn", model_args=ARGS, size=32, batch=4, epochs=4, lr=1e-2
    )
    return TrainConfig(data=data, out=str(out), **(given | dict(label_smoothing=0.0) | options))


def test_a_run_learns_and_leaves_a_model(data: str, tmp_path: Path) -> None:
    result = train(config(data, tmp_path / "run", epochs=30, augment="none"), progress=False)
    assert result.score == "miou"
    assert result.metrics["miou"] > 0.7
    assert result.history[-1]["loss"] < 0.5 * result.history[0]["loss"]
    assert read_config(tmp_path / "run")["task"] == "segment"
    model, classes, preprocess = rebuild(read_config(tmp_path / "run"))
    model.load_state_dict(read_weights(tmp_path / "run"))
    assert (classes, preprocess.size) == (["ground", "square"], (32, 32))


def test_a_run_that_was_stopped_goes_on(data: str, tmp_path: Path) -> None:
    """Two epochs, then two more, are the four epochs of one run."""
    whole = train(config(data, tmp_path / "whole"), progress=False)
    task = type(open_segment(config(data, tmp_path)))
    with dies_at_evaluation(task, 3):
        train(config(data, tmp_path / "parts"), progress=False)
    again = train(config(data, tmp_path / "parts", resume="auto"), progress=False)
    assert [r["val_miou"] for r in again.history] == [r["val_miou"] for r in whole.history]
    first, second = (read_weights(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_unreadable_masks_are_left_out_and_told(data: str, tmp_path: Path) -> None:
    broken = tmp_path / "data/masks/train/3.png"
    broken.write_bytes(b"no mask")
    result = train(config(data, tmp_path / "run", epochs=1, max_bad_images=0.5), progress=False)
    (bad,) = result.unreadable
    assert bad.path == str(broken)
    assert "annotation of image 3, file" in bad.reason


def test_start_from_a_classifier_and_from_a_segmentation_model(data: str, tmp_path: Path) -> None:
    classifier = dict(model="resnet18", model_args=BACKBONE["backbone_args"], data="digits", task="classify")
    folder = tmp_path / "classifier"
    train(TrainConfig(**classifier, out=str(folder), epochs=1, size=32, batch=512), progress=False)  # type: ignore[arg-type]
    model = open_segment(config(data, tmp_path, init=str(folder))).model
    learned = read_weights(folder)
    for name, weight in model.backbone.body.state_dict().items():  # type: ignore[union-attr]
        assert torch.equal(weight, learned[name])

    train(config(data, tmp_path / "first", epochs=1), progress=False)
    same = open_segment(config(data, tmp_path, init=str(tmp_path / "first"))).model
    first = read_weights(tmp_path / "first")
    assert all(torch.equal(weight, first[name]) for name, weight in same.state_dict().items())
    (tmp_path / "data/classes.txt").write_text("earth\nsquare\n")
    other = open_segment(config(data, tmp_path, init=str(tmp_path / "first"))).model.state_dict()
    differ = {name for name in first if not torch.equal(first[name], other[name])}
    assert differ == {"decoder.head.classify.weight", "decoder.head.classify.bias"}

    wrong = config(data, tmp_path, init=str(folder), model_args=ARGS | dict(backbone_args={}))
    with pytest.raises(UserError, match=r"init: the weights of 'resnet18' .* do not fit"):
        open_segment(wrong)


def test_options_reach_the_model(data: str, tmp_path: Path) -> None:
    args = dict(backbone="convnext_atto", head_args=dict(dim=8, width=8))
    task = open_segment(config(data, tmp_path, model_args=args, drop_path={"resnet*": 0.1, "convnext*": 0.3}))
    assert task.describe()["model_args"]["backbone_args"] == {"drop_path_rate": 0.3}
    with pytest.raises(UserError, match="drop_path has no rate for 'convnext_atto'"):
        open_segment(config(data, tmp_path, model_args=args, drop_path={"resnet*": 0.1}))


def test_a_backbone_of_one_size_sees_larger_images_through_a_window(data: str, tmp_path: Path) -> None:
    body = dict(embed_dim=24, depth=3, num_heads=3)
    args = dict(backbone="vit_tiny_patch16_224", backbone_args=body, head_args=dict(dim=8, width=8))
    result = train(config(data, tmp_path / "run", epochs=1, model_args=args), progress=False)
    assert result.metrics["miou"] > 0
    assert (
        json.loads((tmp_path / "run/config.json").read_text())["model_args"]["backbone_args"]["img_size"]
        == 32
    )
