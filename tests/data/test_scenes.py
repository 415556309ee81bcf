"""Generated scenes: consistent annotations, determined by seed, split and index."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from visualtokens.data import DigitScenes, Scene
from visualtokens.data.arrays import Digits
from visualtokens.data.scenes import MIN_VISIBLE, _Canvas
from visualtokens.errors import UserError

SIZES = [(128, 128), (32, 32), (48, 160)]


def digest(scene: Scene) -> str:
    tensors = (scene.labels, scene.boxes, scene.masks, scene.semantic, scene.rows)
    parts = [scene.image.tobytes(), *(tensor.numpy().tobytes() for tensor in tensors)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize("size", SIZES)
def test_annotations_are_consistent(size: tuple[int, int]) -> None:
    scenes = DigitScenes("train", size=size)
    for number in range(8):
        scene = scenes.scene(number)
        n = len(scene.labels)
        assert (scene.image.mode, scene.image.size) == ("RGB", (size[1], size[0]))
        assert n >= 1
        assert scene.boxes.shape == (n, 4)
        assert scene.masks.shape == (n, *size)
        assert (scene.boxes.dtype, scene.masks.dtype) == (torch.float32, torch.bool)
        assert scene.masks.sum(0).max() == 1  # a pixel shows one digit
        semantic = torch.zeros(size, dtype=torch.int64)
        for label, (left, top, right, bottom), mask in zip(
            scene.labels.tolist(), scene.boxes.int().tolist(), scene.masks, strict=True
        ):
            y, x = torch.nonzero(mask, as_tuple=True)
            assert [left, top, right, bottom] == [x.min(), y.min(), x.max() + 1, y.max() + 1]
            assert len(x) >= 12
            semantic[mask] = 1 + label
        torch.testing.assert_close(scene.semantic, semantic)


def test_scenes_hold_digits_of_their_own_split_only() -> None:
    train, val = Digits("train"), Digits("val")
    for split, own in (("train", train), ("val", val)):
        scenes = DigitScenes(split, size=(32, 32))
        label_of = dict(zip(own.rows.tolist(), own.labels.tolist(), strict=True))
        for number in range(20):
            scene = scenes.scene(number)
            assert [label_of[row] for row in scene.rows.tolist()] == scene.labels.tolist()


def test_occlusion_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    visible: list[float] = []
    finish = _Canvas.image

    def record(canvas: _Canvas, rng: np.random.Generator) -> object:
        visible.extend(mask.sum() / area for mask, area in zip(canvas.masks, canvas._areas, strict=True))
        return finish(canvas, rng)

    monkeypatch.setattr(_Canvas, "image", record)
    scenes = DigitScenes("train", size=(48, 48))
    for number in range(40):
        scenes.scene(number)
    assert MIN_VISIBLE <= min(visible) < 1
    assert max(visible) == 1


def test_digits_have_contrast_and_the_background_is_cluttered() -> None:
    scenes, brightness = DigitScenes("train"), []
    for number in range(10):
        scene = scenes.scene(number)
        grey = np.asarray(scene.image.convert("L")).astype(float)
        background = grey[scene.semantic.numpy() == 0]
        assert background.std() > 8  # a plain canvas with this noise would have at most 0.03 · 255 = 7.65
        brightness += [abs(grey[mask].mean() - background.mean()) for mask in scene.masks.numpy()]
    assert np.mean(brightness) > 40


def test_a_scene_depends_on_seed_split_size_and_index_only() -> None:
    before = torch.get_rng_state(), np.random.get_state()
    first = digest(DigitScenes("val", length=3).scene(2))
    again = DigitScenes("val", length=1000)
    again.scene(7)
    assert digest(again.scene(2)) == first
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_equal(np.random.get_state(), before[1])
    others = [
        DigitScenes("val").scene(1),
        DigitScenes("val", seed=1).scene(2),
        DigitScenes("train").scene(2),
        DigitScenes("val", size=(128, 96)).scene(2),
    ]
    assert len({first, *map(digest, others)}) == 5


def test_the_label_is_the_largest_visible_digit() -> None:
    scenes = DigitScenes("train", size=(48, 48))
    several = 0
    for number in range(12):
        image, label = scenes[number]
        scene = scenes.scene(number)
        areas = [int(mask.sum()) for mask in scene.masks]
        assert label == scene.labels[areas.index(max(areas))]
        assert image.tobytes() == scene.image.tobytes()
        several += len(areas) > 1
    assert several > 3


def test_scenes_are_a_finite_dataset() -> None:
    scenes = DigitScenes("val", size=(32, 32), length=4)
    assert len(list(scenes)) == len(scenes) == 4
    assert scenes.classes == list("0123456789")
    assert scenes.path(3) == "digit_scenes/val[3]"
    for outside in (-1, 4):
        with pytest.raises(IndexError):
            scenes.scene(outside)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": (31, 64)}, "size=31x64 .* at least 32"),
        ({"length": 0}, "length=0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_invalid_options_are_rejected(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        DigitScenes("train", **options)
