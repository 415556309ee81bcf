"""Predictions of exported models by numpy: the same inputs and answers as by torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.export.test_runtime import DESCRIBED
from visualtokens.data import Preprocess
from visualtokens.data.preprocess import INTERPOLATIONS, SegmentPreprocess
from visualtokens.errors import UserError
from visualtokens.tasks.exported import exported_task, labels_of, softmax
from visualtokens.tasks.segment.inference import labels_of as labels_by_torch

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours with some noise."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8))
    smooth = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    return Image.fromarray((smooth + rng.integers(-9, 10, smooth.shape)).clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("size", [(300, 200), (37, 90), (20, 16)])
def test_input_of_a_classifier_is_the_same_to_the_bit(size: tuple[int, int], interpolation: str) -> None:
    preprocess = Preprocess((48, 32), MEAN, STD, crop=0.875, interpolation=interpolation)
    image = photo(*size)
    assert np.array_equal(preprocess.array(image), preprocess(image).numpy())


@pytest.mark.parametrize("size", [(300, 200), (37, 90), (200, 33)])
def test_input_of_a_segmenter_differs_by_one_level(size: tuple[int, int]) -> None:
    preprocess = SegmentPreprocess((48, 64), MEAN, STD)
    ours, theirs = preprocess.array(photo(*size)), preprocess(photo(*size)).numpy()
    assert ours.shape == theirs.shape
    levels = np.abs(ours - theirs) * 255 * np.reshape(STD, (3, 1, 1))
    assert levels.max() < 1.01
    assert levels.mean() < 0.1


def test_sides_of_a_segmenter_are_multiples() -> None:
    preprocess = SegmentPreprocess((48, 64), MEAN, STD)
    assert preprocess.pixels(photo(300, 200), multiple=32).shape == (64, 64, 3)
    assert preprocess.pixels(photo(1000, 20), least=32).shape[0] == 32


@pytest.mark.parametrize("size", [(7, 9), (20, 31), (3, 2)])
def test_labels_are_those_of_torch(size: tuple[int, int]) -> None:
    logits = torch.randn(4, 7, 9, generator=torch.Generator().manual_seed(0))
    assert np.array_equal(labels_of(logits.numpy(), size), labels_by_torch([logits], size).numpy())


def test_softmax_is_that_of_torch() -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0)) * 30
    assert np.allclose(softmax(logits.numpy()), logits.softmax(1).numpy(), atol=1e-7)


class Fake:
    """Counts the images of each call; the logits are (0, mean of the image)."""

    def __init__(self, **changes: Any) -> None:
        self.described, self.classes = DESCRIBED | changes, ["dark", "light"]
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, images: np.ndarray) -> np.ndarray:
        self.calls.append(images.shape)
        value = images.reshape(len(images), -1).mean(1)
        return np.stack([np.zeros_like(value), value], 1).astype(np.float32)


@pytest.mark.parametrize(("dynamic", "calls"), [(["batch"], [3]), ([], [1, 1, 1])])
def test_fixed_batch_is_one_image(dynamic: list[str], calls: list[int]) -> None:
    model, task = Fake(dynamic=dynamic), exported_task("classify")
    prepared = [task.prepare(model, Image.new("RGB", (9, 9), (grey,) * 3)) for grey in (0, 128, 255)]
    found = task.predict_batch(model, prepared, top=1)
    assert [len(shape) and shape[0] for shape in model.calls] == calls
    probability = [1 / (1 + np.exp(-grey / 255)) for grey in (128, 255)]
    assert [p.top[0][1] for p in found[1:]] == pytest.approx(probability)
    assert list(task.columns(model, top=1)) == ["label", "probability"]


def test_pixels_are_given_as_they_are() -> None:
    model, task = Fake(input="pixels"), exported_task("classify")
    prepared = task.prepare(model, Image.new("RGB", (9, 9), (1, 2, 3)))
    assert prepared.dtype == np.uint8
    assert prepared.shape == (4, 6, 3)


def test_wrong_number_of_outputs_is_refused() -> None:
    model, task = Fake(), exported_task("classify")
    model.classes = ["one"]
    with pytest.raises(UserError, match=r"it returns \(1, 2\); images and classes are \(1, 1\)"):
        task.predict_batch(model, [np.zeros((3, 4, 6), np.float32)])


def test_segmenter_of_one_size_is_refused() -> None:
    stored = {"size": [48, 64], "mean": MEAN, "std": STD, "keep_ratio": True, "longest": None}
    model = SimpleNamespace(described=DESCRIBED | {"preprocess": stored}, classes=["a"])
    with pytest.raises(UserError, match="write it with --dynamic batch,size"):
        exported_task("segment").check(model)  # type: ignore[arg-type]
