"""Segmentation training: loss, description, options and whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests.train.helpers import dies_at_evaluation
from visualtokens.checkpoint import load
from visualtokens.data.scenes import DigitScenes
from visualtokens.data.segmentation import SEGMENT_PRESETS, SceneMasks, SegmentBatch, SegmentPreprocess
from visualtokens.errors import UserError
from visualtokens.files import read_weights
from visualtokens.tasks.segment import SegmentLoss, create, loss_of
from visualtokens.tasks.segment.task import Segment, SegmentTraining
from visualtokens.tasks.task import Loading, open_training
from visualtokens.train import TrainConfig, train

PREPROCESS = SegmentPreprocess((32, 32), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), longest=96)
ARGS = dict(
    backbone="resnet18",
    backbone_args=dict(channels=[8, 8, 8, 8]),
    head_args=dict(dim=8, width=8, token_dim=8, attn_dim=4, hidden=8),
)


def make_training(*, auxiliary: bool = False, loss: SegmentLoss | None = None) -> SegmentTraining:
    torch.manual_seed(0)
    model_args = ARGS | dict(auxiliary=auxiliary)
    train, val = (SceneMasks(DigitScenes(split, size=(32, 48), length=6)) for split in ("train", "val"))
    return SegmentTraining(
        Segment(),
        create("vt_fpn", classes=11, **model_args),
        head="vt_fpn",
        model_args=model_args | dict(pretrained=False),
        train_set=train,
        val_set=val,
        preprocess=PREPROCESS,
        augment=SEGMENT_PRESETS["digits"],
        loss=loss or SegmentLoss(),
    )


def test_batches_are_those_of_the_loaders() -> None:
    task = make_training()
    assert task.images == (6, 6)
    assert task.classes == ["background", *"0123456789"]
    train = task.train_loader(Loading(batch=4, seed=1))
    assert [len(batch) for batch in train] == [4, 2]
    assert all(batch.images.shape[2:] == (32, 32) for batch in train)
    (val,) = task.val_loader(Loading(batch=8))
    assert val.images.shape[2:] == (32, 48)


class Fixed(nn.Module):
    """Returns a constant."""

    def __init__(self, output: Tensor | tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.output = output

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.output


def test_loss_adds_the_auxiliary_head_and_reports_the_accuracy() -> None:
    task = make_training(loss=SegmentLoss(auxiliary=0.3, class_weights={"7": 5.0}))
    task.to(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(2, 11, 4, 4, generator=generator) for _ in range(2))
    masks = torch.randint(11, (2, 4, 4), generator=generator).to(torch.uint8)
    masks[0, :2] = 255
    masks[1, 0] = first[1, :, 0].argmax(0)  # at least these are right
    sizes = torch.full((2, 2), 4)
    batch = SegmentBatch(torch.zeros(2, 3, 4, 4), masks, sizes, sizes, torch.arange(2), ())
    found = task.loss(Fixed((first, second)), batch, rng=np.random.default_rng(0))
    weights = torch.ones(11)
    weights[8] = 5
    expected = loss_of(first, masks, weights=weights) + 0.3 * loss_of(second, masks, weights=weights)
    torch.testing.assert_close(found.value, expected)
    right = sum(
        int(first[b, :, i, j].argmax()) == int(masks[b, i, j])
        for b, i, j in (masks != 255).nonzero().tolist()
    )
    assert found.sums["pixel_accuracy"].item() == pytest.approx(2 * right / 24)
    alone = task.loss(Fixed(first), batch, rng=np.random.default_rng(0))
    torch.testing.assert_close(alone.value, loss_of(first, masks, weights=weights))


def test_a_few_steps_reduce_the_loss() -> None:
    task = make_training(auxiliary=True)
    (batch,) = task.train_loader(Loading(batch=6))
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = task.loss(task.model, batch, rng=np.random.default_rng(0)).value
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_evaluate_covers_every_pixel() -> None:
    task = make_training()
    found = task.evaluate(task.model, task.val_loader(Loading(batch=4)), progress=False)
    assert found.images == 6
    assert set(found.metrics) >= {"loss", "miou"}
    assert int(found.confusion.sum()) == 6 * 32 * 48


def test_description_is_json_and_rebuilds_the_model() -> None:
    task = make_training(auxiliary=True)
    described = json.loads(json.dumps(task.describe()))
    assert "pretrained" not in described["model_args"]
    model, classes, preprocess = Segment().build(described)
    assert (classes, preprocess) == (task.classes, PREPROCESS)
    model.load_state_dict(task.model.state_dict())
    x = torch.randn(1, 3, 40, 40)
    with torch.inference_mode():
        torch.testing.assert_close(model.eval()(x), task.model.eval()(x))


def test_damaged_description_is_refused() -> None:
    described = make_training().describe()
    rebuild = Segment().build
    for name, message in (("architecture", "does not name"), ("preprocess", "is damaged")):
        with pytest.raises(UserError, match=message):
            rebuild({key: value for key, value in described.items() if key != name})
    with pytest.raises(UserError, match="may not hold 'pretrained'"):
        rebuild(described | dict(model_args=ARGS | dict(pretrained=True)))
    with pytest.raises(UserError, match="backbone_args may not hold 'checkpoint_path'"):
        rebuild(
            described | dict(model_args=dict(backbone="resnet18", backbone_args=dict(checkpoint_path="x")))
        )
    with pytest.raises(UserError, match="unknown model_args of a segmentation model 'backbon'"):
        rebuild(described | dict(model_args=dict(backbon="resnet18")))
    with pytest.raises(UserError, match="needs a backbone"):
        rebuild(described | dict(model_args={}))


def test_single_class_is_refused() -> None:
    task = make_training()
    task.train_set.classes = task.val_set.classes = ["background"]
    with pytest.raises(UserError, match="has 1 class"):
        SegmentTraining(
            Segment(),
            task.model,
            head="vt_fpn",
            model_args=ARGS,
            train_set=task.train_set,
            val_set=task.val_set,
            preprocess=PREPROCESS,
            augment=SEGMENT_PRESETS["none"],
            loss=SegmentLoss(),
        )


# Whole runs.

SMALL_BACKBONE = dict(backbone="resnet18", backbone_args=dict(channels=[8, 8, 8, 8]))
RUN_ARGS = SMALL_BACKBONE | dict(head_args=dict(dim=8, width=8))


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Twelve training and two validation images of a bright square on dark ground."""
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
        task="segment", model="fpn", model_args=RUN_ARGS, size=32, batch=4, epochs=4, lr=1e-2
    )
    return TrainConfig(data=data, out=str(out), **(given | dict(label_smoothing=0.0) | options))


def test_run_learns_and_saves_a_model(data: str, tmp_path: Path) -> None:
    result = train(config(data, tmp_path / "run", epochs=20, augment="none"), progress=False)
    assert result.score == "miou"
    # An image without the square would score half of the ground's share, 1 − 18² / (40 · 48), which is 0.42.
    assert result.metrics["miou"] > 0.48
    assert result.history[-1]["loss"] < 0.5 * result.history[0]["loss"]
    run = load(tmp_path / "run")
    assert (run.task.name, run.classes, run.preprocess.size) == ("segment", ["ground", "square"], (32, 32))


def test_interrupted_run_resumes(data: str, tmp_path: Path) -> None:
    """Two epochs, then two more, equal four epochs of one run."""
    whole = train(config(data, tmp_path / "whole"), progress=False)
    task = type(open_training(config(data, tmp_path)))
    with dies_at_evaluation(task, 3):
        train(config(data, tmp_path / "parts"), progress=False)
    again = train(config(data, tmp_path / "parts", resume="auto"), progress=False)
    assert [r["val_miou"] for r in again.history] == [r["val_miou"] for r in whole.history]
    first, second = (read_weights(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_unreadable_masks_are_left_out_and_reported(data: str, tmp_path: Path) -> None:
    broken = tmp_path / "data/masks/train/3.png"
    broken.write_bytes(b"no mask")
    result = train(config(data, tmp_path / "run", epochs=1, max_bad_images=0.5), progress=False)
    (bad,) = result.unreadable
    assert bad.path == str(broken)
    assert "annotation of image 3, file" in bad.reason


def test_init_from_a_classifier_and_from_a_segmentation_model(data: str, digits: str, tmp_path: Path) -> None:
    classifier = dict(
        model="resnet18", model_args=SMALL_BACKBONE["backbone_args"], data=digits, task="classify"
    )
    folder = tmp_path / "classifier"
    train(TrainConfig(**classifier, out=str(folder), epochs=1, size=32, batch=64), progress=False)  # type: ignore[arg-type]
    model = open_training(config(data, tmp_path, init=str(folder))).model
    learned = read_weights(folder)
    for name, weight in model.backbone.body.state_dict().items():  # type: ignore[union-attr]
        assert torch.equal(weight, learned[name])

    train(config(data, tmp_path / "first", epochs=1), progress=False)
    same = open_training(config(data, tmp_path, init=str(tmp_path / "first"))).model
    first = read_weights(tmp_path / "first")
    assert all(torch.equal(weight, first[name]) for name, weight in same.state_dict().items())
    (tmp_path / "data/classes.txt").write_text("earth\nsquare\n")
    other = open_training(config(data, tmp_path, init=str(tmp_path / "first"))).model.state_dict()
    differ = {name for name in first if not torch.equal(first[name], other[name])}
    assert differ == {"decoder.head.classify.weight", "decoder.head.classify.bias"}

    wrong = config(data, tmp_path, init=str(folder), model_args=RUN_ARGS | dict(backbone_args={}))
    with pytest.raises(UserError, match=r"init: the weights in .* do not fit 'resnet18', so none was loaded"):
        open_training(wrong)


def test_options_reach_the_model(data: str, tmp_path: Path) -> None:
    args = dict(backbone="convnext_atto", head_args=dict(dim=8, width=8))
    task = open_training(
        config(data, tmp_path, model_args=args, drop_path={"resnet*": 0.1, "convnext*": 0.3})
    )
    assert task.describe()["model_args"]["backbone_args"] == {"drop_path_rate": 0.3}
    with pytest.raises(UserError, match="drop_path has no rate for 'convnext_atto'"):
        open_training(config(data, tmp_path, model_args=args, drop_path={"resnet*": 0.1}))


def test_backbone_of_fixed_size_slides_a_window(data: str, tmp_path: Path) -> None:
    body = dict(embed_dim=24, depth=3, num_heads=3)
    args = dict(backbone="vit_tiny_patch16_224", backbone_args=body, head_args=dict(dim=8, width=8))
    result = train(config(data, tmp_path / "run", epochs=1, model_args=args), progress=False)
    assert result.metrics["miou"] > 0
    assert (
        json.loads((tmp_path / "run/config.json").read_text())["model_args"]["backbone_args"]["img_size"]
        == 32
    )
