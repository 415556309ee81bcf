"""Segmentation as the training engine sees it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from visualtokens.data.scenes import DigitScenes
from visualtokens.data.segmentation import SceneMasks
from visualtokens.data.segmentation_loader import SegmentBatch
from visualtokens.data.segmentation_transforms import SEGMENT_PRESETS, SegmentPreprocess
from visualtokens.errors import UserError
from visualtokens.tasks.segment import SegmentLoss, create, loss_of
from visualtokens.tasks.segment.task import Segment, rebuild
from visualtokens.tasks.task import Loading

PREPROCESS = SegmentPreprocess((32, 32), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), longest=96)
ARGS = dict(
    backbone="resnet18",
    backbone_args=dict(channels=[8, 8, 8, 8]),
    head_args=dict(dim=8, width=8, token_dim=8, attn_dim=4, hidden=8),
)


def make_task(*, auxiliary: bool = False, loss: SegmentLoss | None = None) -> Segment:
    torch.manual_seed(0)
    model_args = ARGS | dict(auxiliary=auxiliary)
    train, val = (SceneMasks(DigitScenes(split, size=(32, 48), length=6)) for split in ("train", "val"))
    return Segment(
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
    task = make_task()
    assert (task.name, task.score, task.images) == ("segment", "miou", (6, 6))
    assert task.classes == ["background", *"0123456789"]
    train = task.train_loader(Loading(batch=4, seed=1))
    assert [len(batch) for batch in train] == [4, 2]
    assert all(batch.images.shape[2:] == (32, 32) for batch in train)
    (val,) = task.val_loader(Loading(batch=8))
    assert val.images.shape[2:] == (32, 48)


class Fixed(nn.Module):
    """Says what it was told to."""

    def __init__(self, said: Tensor | tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.said = said

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.said


def test_loss_adds_the_auxiliary_head_and_tells_the_accuracy() -> None:
    task = make_task(loss=SegmentLoss(auxiliary=0.3, class_weights={"7": 5.0}))
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


def test_a_few_steps_make_the_loss_smaller() -> None:
    task = make_task(auxiliary=True)
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


def test_judging_gives_finite_figures() -> None:
    task = make_task()
    found = task.evaluate(task.model, task.val_loader(Loading(batch=4)), progress=False)
    assert found.images == 6
    assert set(found.metrics) >= {"loss", task.score}
    assert int(found.confusion.sum()) == 6 * 32 * 48


def test_a_description_is_json_and_enough_to_build_the_model_again() -> None:
    task = make_task(auxiliary=True)
    described = json.loads(json.dumps(task.describe()))
    assert "pretrained" not in described["model_args"]
    model, classes, preprocess = rebuild(described)
    assert (classes, preprocess) == (task.classes, PREPROCESS)
    model.load_state_dict(task.model.state_dict())
    x = torch.randn(1, 3, 40, 40)
    with torch.inference_mode():
        torch.testing.assert_close(model.eval()(x), task.model.eval()(x))


def test_a_damaged_description_is_told() -> None:
    described = make_task().describe()
    for name in ("architecture", "label_names", "model_args", "preprocess"):
        with pytest.raises(UserError, match="damaged"):
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


def test_one_class_cannot_be_learned() -> None:
    task = make_task()
    task.train_set.classes = ["background"]
    with pytest.raises(UserError, match="has 1 class"):
        Segment(
            task.model,  # type: ignore[arg-type]
            head="vt_fpn",
            model_args=ARGS,
            train_set=task.train_set,
            val_set=task.val_set,
            preprocess=PREPROCESS,
            augment=SEGMENT_PRESETS["none"],
            loss=SegmentLoss(),
        )
