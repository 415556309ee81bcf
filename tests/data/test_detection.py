"""Detection: resizing images with their objects, and batches of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from visualtokens.data import BadImage, Share, open_detection
from visualtokens.data.detection import (
    DetectionBatch,
    DetectionDataset,
    Objects,
    Sizing,
    create_detection_loader,
    fit,
    to_floats,
)
from visualtokens.errors import UserError

sides = st.integers(1, 3000)


@settings(max_examples=50)
@given(sides, sides, st.integers(1, 1000), st.integers(0, 1000))
def test_fit_respects_the_limits_and_the_aspect_ratio(height: int, width: int, short: int, more: int) -> None:
    long = short + more
    new = fit((height, width), short=short, long=long)
    assert 1 <= min(new) <= short
    assert max(new) <= long
    assert min(new) == short or max(new) == long  # as large as possible
    scale = min(short / min(height, width), long / max(height, width))
    assert abs(new[0] - height * scale) <= max(0.5, 1 - height * scale)
    assert abs(new[1] - width * scale) <= max(0.5, 1 - width * scale)


@pytest.mark.parametrize(
    ("size", "expected"),
    [((480, 640), (800, 1067)), ((640, 480), (1067, 800)), ((300, 1000), (400, 1333)), ((1, 1), (800, 800))],
)
def test_fit_at_the_sizes_of_coco(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert fit(size, short=800, long=1333) == expected


def square(*, crowd: bool = False, masks: bool = True) -> tuple[Image.Image, Objects]:
    """A red square of 10 pixels at (20, 5) on 60×40."""
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[5:15, 20:30, 0] = 255
    objects = Objects(
        torch.tensor([[20.0, 5.0, 30.0, 15.0]]),
        torch.tensor([3]),
        torch.from_numpy(pixels[None, :, :, 0] > 0) if masks else None,
        torch.tensor([crowd]),
        torch.tensor([100.0]),
    )
    return Image.fromarray(pixels), objects


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_pixels_boxes_and_masks_change_together(flip: float) -> None:
    pixels, objects = Sizing((80,), 200, flip)(*square(), np.random.default_rng(0))
    assert (pixels.shape, pixels.dtype) == ((3, 80, 120), torch.uint8)
    expected = [60.0, 10.0, 80.0, 30.0] if flip else [40.0, 10.0, 60.0, 30.0]
    assert objects.boxes.tolist() == [expected]
    assert type(objects.boxes) is torch.Tensor  # not a tv_tensor, which would propagate through models
    assert objects.masks is not None
    assert type(objects.masks) is torch.Tensor
    rows, columns = torch.where(objects.masks[0])
    assert [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1] == expected
    bright = pixels[0] > 127
    assert torch.equal(bright, objects.masks[0])


def test_short_sides_and_flips_are_drawn_at_random() -> None:
    sizing, seen, mirrored = Sizing((40, 50, 60), 200, 0.5), set(), 0
    for seed in range(60):
        pixels, objects = sizing(*square(masks=False), np.random.default_rng(seed))
        seen.add(pixels.shape[1])
        mirrored += int(objects.boxes[0, 0] > pixels.shape[2] * 0.4)
    assert seen == {40, 50, 60}
    assert 18 <= mirrored <= 42  # 30 ± 3 standard deviations


def test_crowds_and_vanishing_boxes_are_not_trained_on() -> None:
    assert len(Sizing((40,), 60)(*square(crowd=True), np.random.default_rng(0))[1]) == 0
    assert len(Sizing((3,), 60)(*square(), np.random.default_rng(0))[1]) == 0  # 0.75 pixels wide
    image, objects = square()
    outside = dataclasses.replace(objects, boxes=objects.boxes + 100)
    assert len(Sizing((40,), 60)(image, outside, np.random.default_rng(0))[1]) == 0


def test_boxes_are_clipped_to_the_image() -> None:
    image, objects = square(masks=False)
    objects = dataclasses.replace(objects, boxes=torch.tensor([[-5.0, -4.0, 5.0, 8.0]]))
    assert Sizing((40,), 60)(image, objects, np.random.default_rng(0))[1].boxes.tolist() == [[0, 0, 5, 8]]


@pytest.mark.parametrize("size", [(1, 1), (1, 2000), (800, 600)])
def test_images_of_any_size_are_resized(size: tuple[int, int]) -> None:
    box = torch.tensor([[0.0, 0.0, size[1], size[0]]])
    objects = Objects(
        box, torch.tensor([0]), torch.ones(1, *size, dtype=torch.bool), torch.tensor([False]), box[0, :1]
    )
    pixels, found = Sizing((80,), 133)(
        Image.new("RGB", (size[1], size[0])), objects, np.random.default_rng(0)
    )
    assert max(pixels.shape) <= 133
    assert found.boxes.tolist() == [[0, 0, pixels.shape[2], pixels.shape[1]]]
    assert found.masks is not None
    assert found.masks.all()


@pytest.mark.parametrize(
    "options", [dict(short=()), dict(short=(0,)), dict(short=(90,), long=80), dict(flip=2.0)]
)
def test_invalid_sizing_is_rejected(options: dict) -> None:
    with pytest.raises(UserError):
        Sizing(**options)


def test_scenes_have_their_digits_as_objects() -> None:
    dataset = open_detection("digit_scenes:48x64", "val")
    image, objects = dataset[0]
    assert image.size == (64, 48)
    assert objects.masks is not None
    for box, mask in zip(objects.boxes, objects.masks, strict=True):
        rows, columns = torch.where(mask)
        assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    assert torch.equal(objects.area, objects.masks.sum((1, 2)).float())
    assert not objects.crowd.any()
    assert open_detection("digit_scenes:32x32", "val", masks=False)[0][1].masks is None


def test_the_multiscale_preset_draws_the_short_sides_of_coco() -> None:
    sizing = Sizing.preset("multiscale", short=800, long=1333)
    assert sizing == Sizing(tuple(range(480, 801, 32)), 1333, 0.5)
    assert Sizing.preset("none", short=800, long=1333) == Sizing((800,), 1333, 0.0)
    with pytest.raises(UserError, match="unknown augmentation of detection 'multi'"):
        Sizing.preset("multi", short=800, long=1333)


SIZING = Sizing((32, 40), 64, 0.5)


class Few(DetectionDataset):
    """Seven scenes, of which number 3 is unreadable."""

    spec = "few"

    def __init__(self) -> None:
        self.scenes = open_detection("digit_scenes:32x48", "train")
        self.classes = self.scenes.classes

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> tuple[Image.Image, Objects]:
        if index == 3:
            raise BadImage(self.path(index), "damaged")
        return self.scenes[index]

    def path(self, index: int) -> str:
        return f"few[{index}]"


def same(a: DetectionBatch, b: DetectionBatch) -> bool:
    tensors = [
        [*batch.images, batch.index, *(t for each in batch.objects for t in each.tensors())]
        for batch in (a, b)
    ]
    return len(tensors[0]) == len(tensors[1]) and all(map(torch.equal, *tensors))


def test_evaluation_is_in_order_with_unchanged_images_and_objects() -> None:
    dataset = Few()
    batches = list(create_detection_loader(dataset, batch=3, sizing=None))
    assert [batch.index.tolist() for batch in batches] == [[0, 1, 2], [4, 5], [6]]
    assert [bad.path for batch in batches for bad in batch.bad] == ["few[3]"]
    image, objects = dataset[6]
    assert np.array_equal(batches[2].images[0].permute(1, 2, 0).numpy(), np.asarray(image))
    assert all(map(torch.equal, batches[2].objects[0].tensors(), objects.tensors()))
    floats = to_floats(batches[2].images[0])
    torch.testing.assert_close(floats, batches[2].images[0] / 255, rtol=0, atol=1e-7)


def test_training_depends_on_seed_and_epoch_only() -> None:
    alone, two = (create_detection_loader(Few(), batch=2, sizing=SIZING, workers=w, seed=5) for w in (0, 2))
    alone.set_epoch(1)
    two.set_epoch(1)
    first = list(alone)
    assert all(map(same, first, two))
    assert sorted(i for batch in first for i in batch.index.tolist()) == [0, 1, 2, 4, 5, 6]
    alone.set_epoch(0)
    assert not all(map(same, alone, first))


def test_shares_make_up_the_batch() -> None:
    whole, *parts = (
        next(iter(create_detection_loader(Few(), batch=4, sizing=SIZING, seed=1, share=share)))
        for share in (Share(), Share(0, 2), Share(1, 2))
    )
    assert sorted(i for part in parts for i in part.index.tolist()) == sorted(whole.index.tolist())
