from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visualtokens.errors import UserError
from visualtokens.explain import Explanation, Layer, explain

from .stubs import OneRegion, explain_clusters, explanation, one_hot_maps, preprocess


def test_map_on_image_of_a_crop() -> None:
    """The model sees the middle 200×200 of 300×200 pixels; the lower left of 2×2 patches is hot."""
    image = Image.new("RGB", (300, 200), "white")
    model = OneRegion(one_hot_maps()[2:3], slice(8, 16), slice(0, 8))
    heat = explain_clusters(model, image, preprocess=preprocess(16, 16)).map_on_image(0)
    assert heat.shape == (200, 300)
    assert heat[150:, 50:100].min() == 1  # beyond the centre of the patch
    assert heat[:50].max() == 0
    assert heat[:, 200:].max() == 0
    assert heat[:, :50].max() == 0  # outside the crop
    assert heat[175, 149:151].tolist() == pytest.approx([0.505, 0.495])  # halfway, between two pixels


def test_the_crop_share_is_respected() -> None:
    model = OneRegion(one_hot_maps()[:1], slice(0, 8), slice(0, 8))
    got = explain(model, Image.new("RGB", (100, 100), "white"), preprocess=preprocess(16, 16, crop=0.5))
    assert got.crop_box == (25, 25, 75, 75)
    heat = got.map_on_image(0)
    assert heat[25, 25] == 1
    assert heat[24].max() == heat[:, 24].max() == 0


def test_properties() -> None:
    got = explanation()
    assert got.top == (1, 0, 3)
    assert got.predicted == 1
    assert got.target_is_prediction
    assert got.class_name(2) == "class 2"
    assert got.masked_probability(1) == pytest.approx(0.43)


@pytest.mark.parametrize(
    ("target", "truth", "about"),
    [
        (1, None, "Explained class: dog, as predicted; the true class is unknown."),
        (1, 1, "Explained class: dog, as predicted and correct."),
        (1, 2, "Explained class: dog, as predicted but wrong; the true class is bird."),
        (0, None, "Explained class: cat; the model predicts dog."),
        (0, 0, "Explained class: cat, the true class; the model predicts dog."),
    ],
)
def test_about(target: int, truth: int | None, about: str) -> None:
    assert explanation(classes=("cat", "dog", "bird"), target=target, truth=truth).about == about


HARD = dict(
    classes=("zero", "<b>", "三"),
    truth=2,
    form="hard",
    attention=np.eye(4, dtype=np.float32).reshape(4, 2, 2)[::-1],
    of="attention",
    layers=(
        Layer("blocks.0.tap", "hard", 4, np.arange(4).reshape(2, 2)),
        Layer("blocks.1.tap", "hard", 2, np.array([[0, -1], [0, 1]])),
    ),
)


SOFT = dict(
    layers=(
        Layer("tap", "soft", 2, np.zeros((2, 2), dtype=int), np.arange(8, dtype=np.uint8).reshape(2, 2, 2)),
    ),
)


@pytest.mark.parametrize("changes", [{}, HARD, SOFT])
def test_npz_round_trip(tmp_path: Path, changes: dict) -> None:
    before = explanation(**changes)
    after = Explanation.load(before.save(tmp_path / "new" / "x.npz"))
    for name, value in vars(before).items():
        got = getattr(after, name)
        if name == "layers":
            got, value = (
                [
                    {**vars(one), "assignment": one.assignment.tolist(), "maps": np.array(one.maps).tolist()}
                    for one in s
                ]
                for s in (got, value)
            )
        if name == "image" or isinstance(value, np.ndarray):
            assert np.array_equal(np.asarray(got), np.asarray(value)), name
        else:
            assert got == value, name


def test_figures_have_a_panel_per_cluster_and_layer() -> None:
    def titles(figure: object) -> list[str]:
        return [ax.get_title() for ax in figure.axes if ax.images]  # type: ignore[attr-defined]

    soft = explanation(classes=("a", "$\\frac{", "c"))  # not parsed as a formula
    assert titles(soft.plot()) == [
        "$\\frac{\nprobability 0.85",
        "cluster 1\n−0.42",
        "cluster 0\n−0.02",
        "cluster 3\n0.00",
    ]
    hard = explanation(**HARD)
    assert len(titles(hard.plot())) == 1 + 1 + 3
    assert titles(hard.plot_layers()) == [
        "blocks.0\n4 tokens for 4 patches",
        "blocks.1\n2 tokens for 4 patches, 1 dropped",
    ]
    with pytest.raises(UserError, match=r"plot\(\) shows the maps"):
        soft.plot_layers()


def test_png(tmp_path: Path) -> None:
    path = explanation(classes=("$1", "$\\frac{", "{}"), shown=1).save(tmp_path / "x.png")
    pixels = np.asarray(Image.open(path).convert("RGB"))
    half = pixels.shape[1] // 2
    for panel in (pixels[:, :half], pixels[:, half:]):
        assert len(np.unique(panel.reshape(-1, 3), axis=0)) > 50


def test_plotting_opens_no_pyplot_figures() -> None:
    import matplotlib.pyplot as plt

    explanation(shown=1).plot()
    assert plt.get_fignums() == []


def test_unknown_suffix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\.png, \.html or \.npz"):
        explanation().save(tmp_path / "x.html.gz")
    assert not list(tmp_path.iterdir())
