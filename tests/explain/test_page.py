"""Pages and animations of explanations by regions."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.errors import UserError
from visualtokens.explain import Explanation, Layer, explain
from visualtokens.explain.animation import frames
from visualtokens.explain.cards import bars
from visualtokens.explain.explanation import Variant
from visualtokens.explain.page import explanation_page
from visualtokens.explain.render import FOCUS, SHADE, draw_focus, draw_regions, inner_cells

from .stubs import check_self_contained, explanation, noise_image, preprocess

CLASSES = ("zero", "one", "two")


def by_regions(**changes: object) -> Explanation:
    picture = noise_image(16, 16)
    fields: dict = dict(
        method="shapley",
        form="hard",
        values=np.array([0.3, 0.4, -0.15, 0.1], dtype=np.float32),
        errors=np.array([0.02, 0.03, 0.01, 0.02], dtype=np.float32),
        order=(1, 0, 3, 2),
        full=0.85,
        empty=0.2,
        evaluations=64,
        hide="mean",
        only=Variant((0, 1, 3), 0.9, picture),
        without=Variant((2,), 0.1, picture),
        heat=np.arange(16, dtype=np.float32).reshape(4, 4),
        classes=CLASSES,
    )
    return explanation(**fields | changes)


def test_a_page_of_regions() -> None:
    page = check_self_contained(explanation_page(by_regions()))
    text = "".join(page.text)
    assert "0.20 with every region hidden, plus 0.65 from all regions, makes 0.85." in text
    assert "only 1, 2, 3" in text
    assert "without 1, 2, 3" in text
    assert len(page.find("img")) == 1 + 4  # the numbered photo; every patch, the whole image, two variants


def test_bars_start_at_zero_and_have_intervals() -> None:
    """The axis runs from the lowest to the highest end of an interval."""
    text = bars(by_regions())
    low, high = -0.15 - 1.96 * 0.01, 0.4 + 1.96 * 0.03
    rows = text.split("<li>")[1:]
    assert [re.findall(r'class="no (\w+)">(\d)', row) for row in rows] == [
        [("for", "1")],
        [("for", "2")],
        [("for", "3")],
        [("against", "4")],  # the one region that lowers the score is listed too
    ]
    zero = 100 * (0 - low) / (high - low)
    for row, value, error in zip(rows, (0.4, 0.3, 0.1, -0.15), (0.03, 0.02, 0.02, 0.01), strict=True):
        start, width = map(
            float, re.findall(r'<i class="\w+" style="left: ([\d.]+)%; width: ([\d.]+)%', row)[0]
        )
        assert start == pytest.approx(min(zero, zero + 100 * value / (high - low)), abs=0.1)
        assert width == pytest.approx(100 * abs(value) / (high - low), abs=0.1)
        assert float(re.findall(r"± ([\d.]+)", row)[0]) == pytest.approx(1.96 * error, abs=0.005)
    assert "others" not in text


def test_regions_that_are_not_listed_are_summed() -> None:
    text = bars(by_regions(shown=1, errors=np.full(4, 0.2, dtype=np.float32)))  # too uncertain to be listed
    assert "3 others" in text
    assert '<span class="amount">+0.25</span>' in text


def test_questions_of_other_kinds() -> None:
    focus = np.zeros((16, 16), dtype=bool)
    focus[4:8] = True
    page = explanation_page(by_regions(kind="area", focus=focus))
    assert "<title>Why “one” here?</title>" in page
    assert "on the 25% of the pixels" in page
    assert "Why “one” rather than “two”?" in explanation_page(by_regions(against=2))
    assert "score × IoU" in explanation_page(by_regions(kind="object", focus=focus))


def test_the_true_class_beside_a_wrong_answer() -> None:
    wrong = by_regions(truth=2)
    page = check_self_contained(explanation_page(wrong, beside=by_regions(target=2, truth=2, full=0.1)))
    assert "And “two”?" in page.text
    assert "two <small>true class</small>" in explanation_page(wrong)


def test_a_saved_explanation_of_an_area(tmp_path: Path) -> None:
    focus = np.eye(16, dtype=bool)
    saved = by_regions(kind="area", focus=focus).save(tmp_path / "x.npz")
    loaded = Explanation.load(saved)
    assert (loaded.kind, loaded.score_name) == ("area", "mean probability")
    assert loaded.focus is not None
    np.testing.assert_array_equal(loaded.focus, focus)


# Drawing.


def test_the_inner_cell_is_far_from_the_border() -> None:
    mask = np.zeros((7, 9), dtype=bool)
    mask[1:6, 2:7] = True
    mask[0, 0] = True
    cells = inner_cells(mask)
    assert cells[0].tolist() == [3, 4]
    assert len(cells) == mask.sum()
    assert inner_cells(np.ones((1, 3), dtype=bool))[0].tolist() == [0, 1]


def test_regions_are_lit_and_the_others_shaded() -> None:
    image = Image.new("RGB", (80, 80), (200, 100, 0))
    drawn = np.asarray(draw_regions(image, np.arange(4).reshape(2, 2), [(1, True)], box=(0, 0, 80, 80)))
    assert drawn[5, 75].tolist() == [200, 100, 0]
    np.testing.assert_allclose(drawn[75, 5], SHADE * (np.array([200, 100, 0]) + 100) / 2, atol=1)
    blue = (drawn[15:25, 55:65].astype(int) @ [-1, 0, 1]) > 100
    assert blue.any()  # the disc of the number


def test_the_focus_is_outlined() -> None:
    focus = np.zeros((8, 8), dtype=bool)
    focus[2:6, 2:6] = True
    drawn = np.asarray(draw_focus(Image.new("RGB", (80, 80)), focus, box=(0, 0, 80, 80)))
    yellow = (drawn == FOCUS).all(2)
    assert yellow[19:21, 40].any()
    assert not yellow[25:55, 25:55].any()
    assert not yellow[:15].any()


# Animation.


def test_patches_flow_together() -> None:
    layers = (
        Layer("a", "hard", 2, np.array([[0, 0], [1, 1]])),
        Layer("b", "hard", 1, np.array([[0, 0], [-1, -1]])),
    )
    image = Image.fromarray(np.repeat(np.arange(20, dtype=np.uint8)[:, None] * 12, 60, 1).reshape(20, 20, 3))
    pictures = frames(explanation(image=image, crop_box=(0, 0, 20, 20), layers=layers))
    assert len({picture.size for picture in pictures}) == 1
    width, height = pictures[0].size
    last = np.asarray(pictures[-1]).astype(int)
    background = last[0, 0]
    assert (np.abs(last[height // 4, width // 2] - background) > 5).any()  # the token of the upper half
    np.testing.assert_array_equal(
        last[3 * height // 4 :], np.broadcast_to(background, last[3 * height // 4 :].shape)
    )


@pytest.mark.parametrize("name", ["x.webp", "x.gif"])
def test_animations_are_files(tmp_path: Path, name: str) -> None:
    saved = by_regions().animate(tmp_path / "new" / name)
    with Image.open(saved) as animation:
        assert getattr(animation, "n_frames", 1) > 10
        assert animation.info["loop"] == 0
    with pytest.raises(UserError, match=r"end the name in \.webp or \.gif"):
        by_regions().animate(tmp_path / "x.mp4")


# Attention channels.


class PooledKeys(nn.Module):
    """Patches of 4×4 pixels that attend to the means of four quadrants, as PVTv2's do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.embed(x)
        keys = F.adaptive_avg_pool2d(patches, 2).flatten(2).mT.unsqueeze(1)  # (B, 1, 4, C)
        queries = patches.flatten(2).mT.unsqueeze(1)  # (B, 1, N, C)
        out = F.scaled_dot_product_attention(queries, keys, keys)
        return out.mean((1, 2))[:, :3]


def test_the_attention_of_a_model_without_clusters() -> None:
    torch.manual_seed(0)
    model = PooledKeys().eval()
    image = torch.randn(3, 16, 24)
    options: dict = dict(method="cluster", preprocess=preprocess(16, 24))
    got = explain(model, image, of="attention", **options)
    assert got.maps.shape == (4, 4, 6)
    with torch.no_grad():
        patches = model.embed(image[None])
        keys = F.adaptive_avg_pool2d(patches, 2).flatten(2).mT
        weights = (patches.flatten(2).mT @ keys.mT / 8**0.5).softmax(2)[0]  # (N, 4)
    maps = weights.T.unflatten(1, (4, 6))
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    np.testing.assert_allclose(got.maps, ((maps - low) / (high - low)).numpy(), atol=1e-5)
    with pytest.raises(UserError, match="or its attention with of='attention'"):
        explain(model, image, **options)
    with pytest.raises(UserError, match="layer=3, but PooledKeys has 1 attention layer"):
        explain(model, image, of="attention", layer=3, **options)
