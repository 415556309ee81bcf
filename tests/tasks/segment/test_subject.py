"""What is explained about a segmented image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from visualtokens.data.preprocess import SegmentPreprocess
from visualtokens.errors import UserError
from visualtokens.explain.inputs import NotExplainable
from visualtokens.tasks import Checkpoint, get_task

CLASSES = ["background", "green", "blue"]
LABELS = np.arange(4).reshape(2, 2)


class Colours(nn.Module):
    """The class of a pixel is its brightest channel: each pixel depends on itself alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: Tensor) -> Tensor:
        return images * self.scale


def checkpoint(*, keep_ratio: bool = True) -> Checkpoint:
    preprocess = SegmentPreprocess((32, 32), (0.5,) * 3, (0.5,) * 3, keep_ratio=keep_ratio)
    config = {"model_args": {"backbone": "resnet18"}}
    return Checkpoint(Colours().eval(), CLASSES, preprocess, get_task("segment"), config)


def picture(width: int = 64, height: int = 32) -> Image.Image:
    """Red, with a green bar over three eighths of the width and a blue one over an eighth."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[..., 0] = 200
    pixels[:, : 3 * width // 8] = (0, 255, 0)
    pixels[:, 3 * width // 8 : width // 2] = (0, 0, 255)
    return Image.fromarray(pixels)


def test_values_of_an_additive_score() -> None:
    """Each pixel adds its own probability, so Shapley values are sums over the pixels of each region."""
    got = checkpoint().explain(picture(), regions=LABELS, budget=32)
    assert (got.kind, got.target) == ("area", 1)  # the largest area that is not background
    green = np.array([-1.0, 1.0, -1.0]) * 2
    p = np.exp(green[1]) / np.exp(green).sum()
    assert got.full == pytest.approx(p, abs=1e-5)
    assert got.empty == pytest.approx(1 / 3, abs=1e-5)
    np.testing.assert_allclose(got.values, [(p - 1 / 3) / 2, 0, (p - 1 / 3) / 2, 0], atol=1e-5)
    assert got.probabilities[1] == pytest.approx(got.full)
    assert got.focus is not None
    assert got.focus.shape == got.input_size == (32, 64)
    assert got.focus.mean() == 3 / 8
    assert "on the 38% of the pixels predicted as it" in got.about


def test_against_another_class_and_a_class_that_is_not_there() -> None:
    run = checkpoint()
    got = run.explain(picture(), target=2, against=1, regions=LABELS, budget=16)
    assert got.score_name == "difference in mean probability"
    assert got.full == pytest.approx(got.probabilities[2] - got.probabilities[1], abs=1e-6)
    assert got.empty == pytest.approx(0, abs=1e-6)
    plain = Image.new("RGB", (40, 40), (0, 255, 0))
    assert run.explain(plain, regions=LABELS, budget=10).target == 1
    with pytest.raises(NotExplainable, match=r"no pixel is predicted as 'blue'; explain .* green"):
        run.explain(plain, target=2, regions=LABELS)
    with pytest.raises(UserError, match="unknown option to explain a checkpoint of task 'segment': 'unit'"):
        run.explain(plain, unit="log-odds")


def test_pictures_have_the_proportions_of_the_photo() -> None:
    """The input has not, because its sides are multiples of 32."""
    got = checkpoint().explain(picture(48, 32), regions=LABELS, budget=32)
    assert got.input_size == (32, 64)
    assert got.only is not None
    assert got.only.picture.size == (64, 43)


def test_sides_are_multiples_of_32() -> None:
    assert checkpoint().task.subject(checkpoint(), picture(110, 40)).inputs.x.shape == (3, 32, 96)
    stretched = checkpoint(keep_ratio=False)
    assert stretched.task.subject(stretched, picture(110, 40)).inputs.x.shape == (3, 32, 32)
