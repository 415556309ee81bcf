from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from visualtokens.data.detection import Objects, Sizing, as_is, fit, open_detection, to_floats
from visualtokens.errors import UserError

sides = st.integers(1, 3000)


@given(sides, sides, st.integers(1, 1000), st.integers(0, 1000))
def test_fit_keeps_the_limits_and_the_shape(height: int, width: int, short: int, more: int) -> None:
    long = short + more
    new = fit((height, width), short=short, long=long)
    assert min(new) >= 1
    assert min(new) <= short
    assert max(new) <= long
    assert min(new) == short or max(new) == long  # as large as allowed
    scale = min(short / min(height, width), long / max(height, width))
    assert abs(new[0] - height * scale) <= max(0.5, 1 - height * scale)
    assert abs(new[1] - width * scale) <= max(0.5, 1 - width * scale)


@pytest.mark.parametrize(
    ("size", "expected"),
    [((480, 640), (800, 1067)), ((640, 480), (1067, 800)), ((300, 1000), (400, 1333)), ((1, 1), (800, 800))],
)
def test_fit_at_cocos_sizes(size: tuple[int, int], expected: tuple[int, int]) -> None:
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
def test_pixels_box_and_mask_stay_together(flip: float) -> None:
    pixels, objects = Sizing((80,), 200, flip)(*square(), np.random.default_rng(0))
    assert (pixels.shape, pixels.dtype) == ((3, 80, 120), torch.uint8)
    expected = [60.0, 10.0, 80.0, 30.0] if flip else [40.0, 10.0, 60.0, 30.0]
    assert objects.boxes.tolist() == [expected]
    assert type(objects.boxes) is torch.Tensor  # no tv_tensor leaves: models would carry it along
    assert objects.masks is not None
    assert type(objects.masks) is torch.Tensor
    rows, columns = torch.where(objects.masks[0])
    assert [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1] == expected
    bright = pixels[0] > 127
    assert torch.equal(bright, objects.masks[0])


def test_every_short_side_is_drawn_and_flips_are_as_often_as_asked() -> None:
    sizing, seen, mirrored = Sizing((40, 50, 60), 200, 0.5), set(), 0
    for seed in range(60):
        pixels, objects = sizing(*square(masks=False), np.random.default_rng(seed))
        seen.add(pixels.shape[1])
        mirrored += int(objects.boxes[0, 0] > pixels.shape[2] * 0.4)
    assert seen == {40, 50, 60}
    assert 18 <= mirrored <= 42  # of 60, three standard deviations


def test_crowds_and_what_vanishes_are_not_to_be_learned() -> None:
    assert len(Sizing((40,), 60)(*square(crowd=True), np.random.default_rng(0))[1]) == 0
    assert len(Sizing((3,), 60)(*square(), np.random.default_rng(0))[1]) == 0  # 0.75 pixels wide
    image, objects = square()
    outside = Objects(objects.boxes + 100, objects.labels, objects.masks, objects.crowd, objects.area)
    assert len(Sizing((40,), 60)(image, outside, np.random.default_rng(0))[1]) == 0


def test_a_box_that_leaves_the_image_is_cut() -> None:
    image, objects = square(masks=False)
    objects = Objects(objects.boxes - 25, objects.labels, None, objects.crowd, objects.area)
    objects = Objects(
        torch.tensor([[-5.0, -4.0, 5.0, 8.0]]), objects.labels, None, objects.crowd, objects.area
    )
    assert Sizing((40,), 60)(image, objects, np.random.default_rng(0))[1].boxes.tolist() == [[0, 0, 5, 8]]


@pytest.mark.parametrize("size", [(1, 1), (1, 2000), (2000, 1), (2000, 1500)])
def test_any_size(size: tuple[int, int]) -> None:
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


def test_for_evaluation_nothing_changes() -> None:
    image, objects = square(crowd=True)
    pixels, same = as_is(image, objects)
    assert same is objects
    assert np.array_equal(pixels.permute(1, 2, 0).numpy(), np.asarray(image))
    assert to_floats(pixels).max() == 1.0


@pytest.mark.parametrize(
    "options", [dict(short=()), dict(short=(0,)), dict(short=(90,), long=80), dict(flip=2.0)]
)
def test_impossible_sizes_are_refused(options: dict) -> None:
    with pytest.raises(UserError):
        Sizing(**options)


def test_scenes_as_objects() -> None:
    dataset = open_detection("digit_scenes:48x64", "val")
    image, objects = dataset[0]
    assert image.size == (64, 48)
    assert objects.masks is not None
    for box, mask in zip(objects.boxes, objects.masks, strict=True):
        rows, columns = torch.where(mask)
        assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    assert torch.equal(objects.area, objects.masks.sum((1, 2)).float())
    assert not objects.crowd.any()
    assert open_detection("digit_scenes", "val", masks=False)[0][1].masks is None
