"""Pictures of classes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from visualtokens.data.decode import read_mask
from visualtokens.data.published_classes import CAMVID_COLOURS, CITYSCAPES, voc_colour
from visualtokens.errors import UserError
from visualtokens.tasks.segment import index_image, overlay, palette, save_prediction

NAMES = ["pet", "background", "border"]


def test_palette_is_distinct_and_independent_of_the_count() -> None:
    colours = palette(255)
    assert colours.shape == (255, 3)
    assert len({tuple(c) for c in colours.tolist()}) == 255
    assert np.array_equal(palette(20), colours[:20])
    assert palette(0).shape == (0, 3)
    first = colours[:20].astype(int)
    gaps = np.abs(first[:, None] - first[None]).sum(2) + 999 * np.eye(20, dtype=int)
    assert gaps.min() > 60  # of 765


def lightness(colours: np.ndarray) -> np.ndarray:
    """L* of CIELAB, by the formula of the luminance."""
    linear = np.where(
        colours / 255 <= 0.04045, colours / 255 / 12.92, ((colours / 255 + 0.055) / 1.055) ** 2.4
    )
    y = linear @ [0.2126, 0.7152, 0.0722]
    return np.where(y > 216 / 24389, 116 * np.cbrt(y) - 16, y * 24389 / 27)


STREET = [colour for _, colour in CITYSCAPES.values()]
STREETS = {
    "cityscapes": STREET,
    "camvid": list(CAMVID_COLOURS.values()),
    "voc": [voc_colour(i) for i in range(21)],
    "dark": [(i, i, i) for i in range(40)],
}


def test_no_class_is_drawn_black() -> None:
    """On asphalt, of about (60, 60, 60), the tint of every class is lighter than the photo."""
    assert lightness(palette(255)).min() >= 45
    for own in STREETS.values():
        colours = palette(len(own), own)
        assert lightness(colours).min() >= 35
        assert len({tuple(c) for c in colours.tolist()}) == len(own)


def test_light_colours_of_a_dataset_are_kept() -> None:
    before, after = np.array(STREET), palette(19, STREET)
    light = lightness(before) >= 36
    assert light.sum() >= 12
    assert np.array_equal(after[light], before[light])
    car = after[13].astype(int)  # (0, 0, 142)
    assert car.argmax() == 2  # still blue
    assert palette(1, [(255, 255, 255)]).tolist() == [[255, 255, 255]]


def test_colours_of_a_dataset_reach_the_pictures(tmp_path: Path) -> None:
    labels = torch.tensor([[0, 1], [0, 1]], dtype=torch.uint8)
    own = [(250, 170, 30), (107, 142, 35)]
    photo = Image.new("RGB", (2, 2), (100, 100, 100))
    given = dict(classes=["a", "b"], colours=own)
    out = np.array(overlay(photo, labels, strength=1.0, **given))  # type: ignore[arg-type]
    assert out[1, 1].tolist() == list(own[1])
    assert list(own[0]) in out.reshape(-1, 3).tolist()  # in the legend; between classes there is a line
    _, indices = save_prediction(photo, labels, out=tmp_path, name="x", **given)  # type: ignore[arg-type]
    assert np.array_equal(read_mask(indices, colours="rgb"), np.array(own)[labels.numpy()])


def test_indices_can_be_read_again(tmp_path: Path) -> None:
    labels = torch.randint(150, (9, 7), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    image = index_image(labels, classes=150)
    image.save(tmp_path / "x.png")
    assert read_mask(tmp_path / "x.png").tolist() == labels.tolist()
    shown = np.array(Image.open(tmp_path / "x.png").convert("RGB"))
    assert np.array_equal(shown, palette(150)[labels.numpy()])


def test_overlay_tints_each_pixel_by_its_class() -> None:
    labels = torch.zeros(8, 8, dtype=torch.uint8)
    labels[:, 4:] = 1
    labels[6:] = 255
    photo = Image.new("RGB", (8, 8), (100, 100, 100))
    out = np.array(overlay(photo, labels, classes=NAMES, strength=0.5, legend=False)).astype(int)
    expected = (100 + palette(3).astype(int)) / 2
    assert np.abs(out[2, 1] - expected[0]).max() <= 1
    assert np.abs(out[2, 6] - expected[1]).max() <= 1
    assert out[7, 1].tolist() == [100, 100, 100]  # ignored pixels stay what they are
    assert out[2, 3].sum() < 0.5 * out[2, 2].sum()  # a line between the classes


def test_legend_names_present_classes() -> None:
    labels = torch.zeros(50, 300, dtype=torch.uint8)
    plain = overlay(Image.new("RGB", (300, 50)), labels, classes=NAMES, legend=False)
    one = overlay(Image.new("RGB", (300, 50)), labels, classes=NAMES)
    assert plain.size == (300, 50)
    assert one.width == 300
    assert one.height > 50
    assert np.array_equal(np.array(one)[:50], np.array(plain))
    many = torch.arange(150, dtype=torch.uint8).repeat_interleave(100).view(50, 300)
    assert overlay(Image.new("RGB", (300, 50)), many, classes=[f"class {i}" for i in range(150)]).height > 500


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (2000, 3)])
def test_any_size(size: tuple[int, int], tmp_path: Path) -> None:
    labels = torch.ones(size[1], size[0], dtype=torch.uint8)
    drawn, numbers = save_prediction(
        Image.new("RGB", size), labels, classes=NAMES, out=tmp_path / "new", name="photo"
    )
    assert (drawn.name, numbers.name) == ("photo_overlay.png", "photo_classes.png")
    assert read_mask(numbers).tolist() == labels.tolist()
    assert Image.open(drawn).width >= size[0]
    ignored = torch.full_like(labels, 255)
    assert overlay(Image.new("RGB", size), ignored, classes=NAMES).size == size


def test_labels_must_match_the_image() -> None:
    with pytest.raises(UserError, match="labels of 3×4 do not fit an image of 5×6"):
        overlay(Image.new("RGB", (6, 5)), torch.zeros(3, 4), classes=NAMES)


def test_names_that_are_not_utf8_or_have_several_lines(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    labels = torch.tensor([[0, 1]], dtype=torch.uint8)
    drawn, indices = save_prediction(
        Image.new("RGB", (2, 1)), labels, classes=[name, "two\nlines"], out=tmp_path, name=name
    )
    assert os.fsencode(drawn.name) == b"caf\xe9_overlay.png"
    assert Image.open(drawn).height > 1
    assert read_mask(indices).tolist() == labels.tolist()
