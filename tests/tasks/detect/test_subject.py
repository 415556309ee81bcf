"""What is explained about a detected object."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from visualtokens.explain.inputs import NotExplainable
from visualtokens.tasks import Checkpoint, get_task
from visualtokens.tasks.detect.subject import class_scores

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
BOX = (8.0, 8.0, 32.0, 24.0)  # left, top, right, bottom


class BrightBox(nn.Module):
    """Finds a cat in one box, with the brightness of its pixels as its score, and a dog beside it."""

    has_masks = False

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 4, 8, stride=8)
        self.transform = SimpleNamespace(min_size=(32,), max_size=100, image_mean=MEAN, image_std=STD)
        self.sizes: set[tuple[int, ...]] = set()

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        self.sizes |= {tuple(image.shape) for image in images}
        return [
            {
                "boxes": torch.tensor([BOX, (40.0, 0.0, 50.0, 10.0)]),
                "labels": torch.tensor([1, 2]),
                "scores": torch.stack((image[:, 8:24, 8:32].mean(), image.new_tensor(0.1))),
            }
            for image in images
        ]


def checkpoint() -> Checkpoint:
    return Checkpoint(BrightBox().eval(), ["cat", "dog"], None, get_task("detect"), {})


def photo() -> Image.Image:
    """56 × 32 pixels, which a detector pads to 64 × 32; white where the cat is."""
    pixels = np.full((32, 56, 3), 30, dtype=np.uint8)
    pixels[8:24, 8:32] = 255
    return Image.fromarray(pixels)


def test_only_the_regions_of_the_object_count() -> None:
    run = checkpoint()
    labels = np.array([[0, 1, 2, 3]])  # columns of 16 pixels, the last half of the fourth is padding
    got = run.explain(photo(), regions=labels, budget=40)
    assert (got.kind, got.target, got.score_name) == ("object", 0, "score × IoU")
    assert run.model.sizes == {(3, 32, 56)}  # the detector never sees the padding
    assert got.full == pytest.approx(1.0)
    assert got.empty == pytest.approx(np.mean(MEAN), abs=1e-6)  # hidden pixels have the mean colour
    # the box has 8 columns in the first region, and 16 in the second
    want = (1 - np.mean(MEAN)) * np.array([8, 16, 0, 0]) / 24
    np.testing.assert_allclose(got.values, want, atol=1e-5)
    assert got.focus is not None
    assert got.focus.shape == (32, 64)
    assert got.focus.sum() == 24 * 16
    assert got.only is not None
    assert got.only.picture.size == (56, 32)


def test_regions_of_features_never_consist_of_padding() -> None:
    torch.manual_seed(0)
    got = checkpoint().explain(photo(), regions=8, budget=24)
    assert got.regions.shape == (4, 8)
    assert (got.regions[:, 7] == got.regions[:, 6]).all()  # the last column is padding
    assert sorted(set(got.regions.ravel().tolist())) == list(range(len(got.values)))


def test_the_object_is_chosen_by_rank_and_class() -> None:
    run = checkpoint()
    labels = np.array([[0, 1, 2, 3]])
    assert run.explain(photo(), object=2, regions=labels, budget=10).target == 1
    assert run.explain(photo(), target=1, regions=labels, budget=10).full == pytest.approx(0.1)
    with pytest.raises(NotExplainable, match="object=3, but the detector finds 2 objects"):
        run.explain(photo(), object=3)
    with pytest.raises(NotExplainable, match="finds 1 'dog' on this image; it finds cat, dog"):
        run.explain(photo(), target=1, object=2)


def test_class_scores_by_hand() -> None:
    found = {
        "boxes": torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 5], [5, 0, 15, 10], [90, 90, 99, 99]]),
        "labels": torch.tensor([1, 1, 3, 2]),
        "scores": torch.tensor([0.4, 0.9, 0.6, 1.0]),
    }
    got = class_scores(found, torch.tensor([0.0, 0, 10, 10]), 4)
    # IoU 1, 1/2, 1/3 and 0; the second box has the better product of class 1
    torch.testing.assert_close(got, torch.tensor([0.45, 0.0, 0.2, 0.0]))
    empty = {name: value[:0] for name, value in found.items()}
    assert class_scores(empty, torch.tensor([0.0, 0, 10, 10]), 2).tolist() == [0, 0]
