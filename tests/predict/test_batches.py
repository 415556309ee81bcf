"""Predictions in batches equal those of single images."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from visualtokens.data import BadImage, Preprocess
from visualtokens.errors import UserError
from visualtokens.predict import Outcome, find_images, predict_images
from visualtokens.tasks import Checkpoint, get_task
from visualtokens.tasks.classify import Classification

CLASSES = list("abcdefg")


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    torch.manual_seed(0)
    model = timm.create_model("paca_vit_nano", num_classes=len(CLASSES)).eval()
    preprocess = Preprocess((32, 32), (0.5,) * 3, (0.25,) * 3)
    return Checkpoint(model, CLASSES, preprocess, get_task("classify"), {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 images of different sizes, of which 3 cannot be read."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for i in range(23):
        pixels = rng.integers(0, 256, (20 + 3 * i, 40 + i, 3), np.uint8)
        Image.fromarray(pixels).save(root / f"{i:02d}.png")
    for i in (0, 7, 22):
        (root / f"{i:02d}.png").write_bytes(b"no image")
    return root


def probabilities(outcomes: Sequence[Outcome]) -> list[torch.Tensor | None]:
    return [o.result.probabilities if isinstance(o.result, Classification) else None for o in outcomes]


@pytest.mark.parametrize(("batch", "workers"), [(1, 1), (4, 3), (64, 2), (None, None)])
def test_batches_equal_single_images(
    checkpoint: Checkpoint, folder: Path, batch: int | None, workers: int | None
) -> None:
    images = find_images([str(folder)])
    outcomes = list(predict_images(checkpoint, images, batch=batch, workers=workers, top=2))
    assert [o.name for o in outcomes] == sorted(map(str, folder.iterdir()))
    assert [o.position for o in outcomes] == list(range(23))
    for i, (outcome, found) in enumerate(zip(outcomes, probabilities(outcomes), strict=True)):
        if i in (0, 7, 22):
            assert isinstance(outcome.result, BadImage)
            assert outcome.result.path == outcome.name
            assert (outcome.result.__traceback__, outcome.result.__cause__) == (None, None), "holds pixels"
            continue
        alone = checkpoint.predict(images.read(i), top=2)
        assert isinstance(alone, Classification)
        assert found is not None
        torch.testing.assert_close(found, alone.probabilities, rtol=1e-4, atol=1e-6)
        assert isinstance(outcome.result, Classification)
        assert [name for name, _ in outcome.result.top] == [name for name, _ in alone.top]
        assert outcome.image is None


def test_chosen_positions_and_kept_images(checkpoint: Checkpoint, folder: Path) -> None:
    images = find_images([str(folder)])
    outcomes = list(predict_images(checkpoint, images, iter([3, 7, 20]), batch=2, keep_images=True))
    assert [o.position for o in outcomes] == [3, 7, 20]
    assert [o.image.size if o.image else None for o in outcomes] == [(43, 29), None, (60, 80)]


def test_batch_of_images(checkpoint: Checkpoint, folder: Path) -> None:
    images = [find_images([str(folder)]).read(i) for i in (1, 2, 3)]
    together = checkpoint.predict_batch(images, top=3)
    for image, found in zip(images, together, strict=True):
        alone = checkpoint.predict(image, top=3)
        assert isinstance(alone, Classification)
        assert isinstance(found, Classification)
        torch.testing.assert_close(found.probabilities, alone.probabilities, rtol=1e-4, atol=1e-6)
        assert found.shown == 3
    assert list(checkpoint.predict_batch([])) == []


def test_a_task_without_batches_predicts_one_image_after_the_other(folder: Path) -> None:
    class Sizes(type(get_task("classify"))):  # type: ignore[misc]
        predicts_batches = False

        def prepare(self, checkpoint: Checkpoint, image: Image.Image) -> Image.Image:
            return image

        def predict(self, checkpoint: Checkpoint, image: Image.Image, **options: Any) -> Any:
            return image.size

        def predict_batch(self, checkpoint: Checkpoint, prepared: Sequence[Any], **options: Any) -> Any:
            assert len(prepared) == 1
            return super(type(get_task("classify")), self).predict_batch(checkpoint, prepared)

    images = find_images([str(folder)])
    plain = Checkpoint(torch.nn.Identity(), CLASSES, None, Sizes(), {})
    outcomes = list(predict_images(plain, images, range(1, 4)))
    assert [o.result for o in outcomes] == [(41, 23), (42, 26), (43, 29)]


def test_reading_ahead_is_limited(
    checkpoint: Checkpoint, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = find_images([str(folder)])
    read, lock = [], threading.Lock()
    original = type(images).read

    def counted(self: Any, index: int) -> Image.Image:
        with lock:
            read.append(index)
        return original(self, index)

    monkeypatch.setattr(type(images), "read", counted)
    outcomes = predict_images(checkpoint, images, batch=3, workers=2)
    next(outcomes)
    outcomes.close()  # type: ignore[attr-defined]
    assert set(range(3)) <= set(read) <= set(range(6))
    assert not [t for t in threading.enumerate() if t.name.startswith("predict")]


def test_work_stops_between_batches(checkpoint: Checkpoint, folder: Path) -> None:
    images, done = find_images([str(folder)]), list[int]()
    for outcome in predict_images(checkpoint, images, batch=4, workers=1, stop=lambda: len(done) > 5):
        done.append(outcome.position)
    assert done == list(range(8)), "the results of a batch are not lost"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch=0 is not a number of images"),
        ({"workers": 0}, "workers=0 is not a number of threads"),
    ],
)
def test_wrong_numbers(checkpoint: Checkpoint, folder: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        predict_images(checkpoint, find_images([str(folder)]), None, **options)  # type: ignore[arg-type]
