from __future__ import annotations

from typing import cast

import pytest
import torch
from PIL import Image

from visualtokens.data import BadImage
from visualtokens.data.base import Share
from visualtokens.data.detection import (
    DetectionBatch,
    DetectionDataset,
    Objects,
    Sizing,
    create_detection_loader,
    open_detection,
)
from visualtokens.errors import UserError

SIZING = Sizing((32, 40), 64, 0.5)


class Few(DetectionDataset):
    """Seven scenes, the third of which cannot be read."""

    spec = "few"

    def __init__(self) -> None:
        self.scenes = open_detection("digit_scenes:32x48", "train")
        self.classes = self.scenes.classes

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> tuple[Image.Image, Objects]:
        if index == 3:
            raise BadImage(self.path(index), "broken")
        return self.scenes[index]

    def path(self, index: int) -> str:
        return f"few[{index}]"


def same(a: DetectionBatch, b: DetectionBatch) -> bool:
    tensors = [
        [*batch.images, batch.index, *(t for each in batch.objects for t in each.tensors())]
        for batch in (a, b)
    ]
    return len(tensors[0]) == len(tensors[1]) and all(map(torch.equal, *tensors))


def test_evaluation_gives_every_image_once_in_order() -> None:
    batches = list(create_detection_loader(Few(), batch=3, sizing=None))
    assert [batch.index.tolist() for batch in batches] == [[0, 1, 2], [4, 5], [6]]
    assert [bad.path for batch in batches for bad in batch.bad] == ["few[3]"]
    assert batches[0].images[0].shape == (3, 32, 48)


def test_training_depends_on_seed_and_epoch_only() -> None:
    alone, helped = (
        create_detection_loader(Few(), batch=2, sizing=SIZING, workers=w, seed=5) for w in (0, 2)
    )
    for epoch in (0, 1):
        alone.set_epoch(epoch)
        helped.set_epoch(epoch)
        first, second = list(alone), list(helped)
        assert all(map(same, first, second))
        assert sorted(i for batch in first for i in batch.index.tolist()) == [0, 1, 2, 4, 5, 6]
    alone.set_epoch(0)
    assert not all(map(same, list(alone), first))
    alone.set_epoch(1, start=2)
    assert all(map(same, list(alone), first[2:]))


def test_shares_make_up_the_batch() -> None:
    whole = next(iter(create_detection_loader(Few(), batch=4, sizing=SIZING, seed=1)))
    parts = [
        next(iter(create_detection_loader(Few(), batch=4, sizing=SIZING, seed=1, share=Share(i, 2))))
        for i in (0, 1)
    ]
    assert sorted(i for part in parts for i in part.index.tolist()) == sorted(whole.index.tolist())


def test_split_keeps_images_with_their_objects() -> None:
    batch = next(iter(create_detection_loader(Few(), batch=7, sizing=None)))
    pieces = batch.split(3)
    assert [len(piece) for piece in pieces] == [2, 2, 2]
    assert [len(piece.bad) for piece in pieces] == [1, 0, 0]
    by_index = {
        i: (image, objects)
        for p in pieces
        for i, image, objects in zip(p.index.tolist(), p.images, p.objects, strict=True)
    }
    for i, image, objects in zip(batch.index.tolist(), batch.images, batch.objects, strict=True):
        assert by_index[i][0] is image
        assert by_index[i][1] is objects
    assert batch.split(1) == [batch]


def test_on_a_device() -> None:
    batch = next(iter(create_detection_loader(Few(), batch=2, sizing=None)))
    moved = batch.to(torch.device("meta"), memory_format=torch.channels_last)
    assert {t.device.type for t in (*moved.images, moved.objects[0].boxes, moved.objects[0].labels)} == {
        "meta"
    }
    assert cast(torch.Tensor, moved.objects[0].masks).is_meta


@pytest.mark.parametrize(
    "options",
    [dict(batch=0), dict(batch=2, workers=-1), dict(batch=1, share=Share(0, 2)), dict(batch=1, seed=-1)],
)
def test_impossible_loaders_are_refused(options: dict) -> None:
    with pytest.raises(UserError):
        create_detection_loader(Few(), sizing=SIZING, **options)


@pytest.mark.parametrize("place", [dict(epoch=-1), dict(epoch=0, start=9)])
def test_impossible_epochs_are_refused(place: dict) -> None:
    with pytest.raises(UserError):
        create_detection_loader(Few(), batch=2, sizing=SIZING).set_epoch(**place)
