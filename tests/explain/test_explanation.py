from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visualtokens.errors import UserError
from visualtokens.explain import Explanation, Layer, explain

from .stubs import OneRegion, explanation, preprocess, quarters


def test_a_hot_cell_lands_on_its_pixels_of_the_original() -> None:
    """The model sees the middle 200×200 of 300×200 pixels; the lower left of its 2×2 cells is hot."""
    image = Image.new("RGB", (300, 200), "white")
    model = OneRegion(quarters()[2:3], slice(8, 16), slice(0, 8))
    heat = explain(model, image, preprocess=preprocess(16, 16)).map_on_image(0)
    assert heat.shape == (200, 300)
    assert heat[150:, 50:100].min() == 1  # beyond the centre of the cell
    assert heat[:50].max() == 0
    assert heat[:, 200:].max() == 0
    assert heat[:, :50].max() == 0  # outside the crop
    assert heat[175, 149:151].tolist() == pytest.approx([0.505, 0.495])  # half way, between two pixels


def test_the_crop_share_is_respected() -> None:
    image = Image.new("RGB", (100, 100), "white")
    model = OneRegion(quarters()[:1], slice(0, 8), slice(0, 8))
    got = explain(model, image, preprocess=preprocess(16, 16, crop=0.5))
    assert got.crop_box == (25, 25, 75, 75)
    heat = got.map_on_image(0)
    assert heat[25, 25] == 1
    assert heat[24].max() == heat[:, 24].max() == 0


def test_maps_on_the_image_stay_between_0_and_1() -> None:
    for k in range(4):
        heat = explanation().map_on_image(k)
        assert heat.min() == 0
        assert heat.max() == 1


def test_what_it_says_of_itself() -> None:
    got = explanation()
    assert got.top == (1, 0, 3)
    assert got.predicted == 1
    assert got.target_is_prediction
    assert not explanation(target=0).target_is_prediction
    assert got.class_name(2) == "class 2"
    assert got.masked_probability(1) == pytest.approx(0.43)


@pytest.mark.parametrize(
    ("target", "truth", "says"),
    [
        (1, None, "Explained is the predicted class, dog; whether it is right is not known."),
        (1, 1, "Explained is the predicted class, dog, which is right."),
        (1, 2, "Explained is the predicted class, dog, which is wrong: it is bird."),
        (0, None, "Explained is cat, although the model predicts dog."),
        (0, 0, "Explained is the right class, cat, although the model predicts dog."),
    ],
)
def test_it_says_which_class_is_explained_and_why(target: int, truth: int | None, says: str) -> None:
    assert explanation(classes=("cat", "dog", "bird"), target=target, truth=truth).about == says


MORE = dict(
    truth=2,
    form="hard",
    attention=np.eye(4, dtype=np.float32).reshape(4, 2, 2)[::-1],
    of="attention",
    layers=(
        Layer("blocks.0.tap", "hard", 4, np.arange(4).reshape(2, 2)),
        Layer("blocks.1.tap", "hard", 1, np.array([[0, -1], [0, 0]])),
    ),
)


@pytest.mark.parametrize("classes", [None, ("zero", "<b>", "三")])
@pytest.mark.parametrize("more", [{}, MORE])
def test_npz_round_trip(tmp_path: Path, classes: tuple[str, ...] | None, more: dict) -> None:
    before = explanation(classes=classes, **more)
    after = Explanation.load(before.save(tmp_path / "deep" / "x.npz"))
    for name in ("probabilities", "maps", "importance", "entropy", "assignment", "attention"):
        assert np.array_equal(getattr(after, name), getattr(before, name))
    for name in (
        "crop_box",
        "input_size",
        "target",
        "classes",
        "order",
        "layer",
        "shown",
        "truth",
        "form",
        "of",
    ):
        assert getattr(after, name) == getattr(before, name)
    assert np.array_equal(np.asarray(after.image), np.asarray(before.image))
    assert len(after.layers) == len(before.layers)
    for a, b in zip(after.layers, before.layers, strict=True):
        assert (a.name, a.form, a.tokens, a.assignment.tolist()) == (
            b.name,
            b.form,
            b.tokens,
            b.assignment.tolist(),
        )


@pytest.mark.parametrize("classes", [None, ("$1", "$\\frac{", "{}")])
def test_png_shows_every_panel(tmp_path: Path, classes: tuple[str, ...] | None) -> None:
    path = explanation(classes=classes).save(tmp_path / "x.png")
    pixels = np.asarray(Image.open(path).convert("RGB"))
    width = pixels.shape[1]
    for panel in range(4):  # the image and three clusters, in one row
        part = pixels[:, panel * width // 4 : (panel + 1) * width // 4]
        assert len(np.unique(part.reshape(-1, 3), axis=0)) > 50


def test_tokens_that_divide_the_patches_are_drawn_too(tmp_path: Path) -> None:
    got = explanation(**MORE)
    assert len([ax for ax in got.plot().axes if ax.images]) == 1 + 1 + 3
    layers = [ax for ax in got.plot_layers().axes if ax.images]
    assert [ax.get_title() for ax in layers] == [
        "blocks.0\n4 tokens for 4 patches",
        "blocks.1\n1 tokens for 4 patches, 1 dropped",
    ]


def test_of_very_many_layers_some_are_drawn() -> None:
    layers = tuple(Layer(f"blocks.{i}.tap", "hard", 4, np.full((2, 2), i % 4)) for i in range(40))
    shown = [ax.get_title() for ax in explanation(layers=layers).plot_layers().axes if ax.images]
    assert len(shown) == 12
    assert shown[0].startswith("blocks.0\n")
    assert shown[-1].startswith("blocks.39\n")


def test_plot_leaves_nothing_open() -> None:
    import matplotlib.pyplot as plt

    figure = explanation().plot()
    assert len([ax for ax in figure.axes if ax.images]) == 4
    assert plt.get_fignums() == []


@pytest.mark.parametrize("name", ["x.jpg", "x", "x.html.gz"])
def test_unknown_suffix(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"\.png, \.html or \.npz"):
        explanation().save(tmp_path / name)
    assert not list(tmp_path.iterdir())
