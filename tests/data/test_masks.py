"""Reading masks: numbers survive, and whatever is wrong is told with file, image and field."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visualtokens.data import BadImage
from visualtokens.data.segmentation_transforms import IGNORE, BadAnnotation, read_mask, renumber

VALUES = np.array([[0, 1, 2], [255, 7, 0]], np.uint8)


def palette_image() -> Image.Image:
    """Whose colours do not follow its numbers."""
    image = Image.fromarray(VALUES).convert("L")
    image.putpalette(np.random.default_rng(0).integers(0, 256, 768, dtype=np.uint8).tobytes())
    return image


@pytest.mark.parametrize("name", ["x.png", "x.bmp", "x.tif"])
@pytest.mark.parametrize("kind", ["grey", "palette"])
def test_numbers_survive(tmp_path: Path, name: str, kind: str) -> None:
    image = palette_image() if kind == "palette" else Image.fromarray(VALUES)
    image.save(tmp_path / name)
    assert read_mask(tmp_path / name).tolist() == VALUES.tolist()


def test_one_bit_and_sixteen_bits(tmp_path: Path) -> None:
    Image.fromarray(VALUES > 0).save(tmp_path / "bit.png")
    assert read_mask(tmp_path / "bit.png").tolist() == [[0, 1, 1], [1, 1, 0]]
    deep = np.array([[0, 300], [65535, 2]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert read_mask(tmp_path / "deep.png").tolist() == deep.tolist()


def told(path: Path, **options: str) -> BadAnnotation:
    with pytest.raises(BadAnnotation) as caught:
        read_mask(path, **options)
    assert caught.value.path == str(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def test_what_is_no_mask_is_told_with_image_and_field(tmp_path: Path) -> None:
    missing = told(tmp_path / "x.png")
    assert (missing.image_id, missing.field, missing.why) == ("x", "file", "no such file")
    assert isinstance(missing, BadImage)

    Image.new("RGB", (4, 4)).save(tmp_path / "rgb.png")
    colours = told(tmp_path / "rgb.png", image_id="000017")
    assert (colours.image_id, colours.field) == ("000017", "mode")
    assert "save one number per pixel" in str(colours)

    Image.fromarray(VALUES).save(tmp_path / "photo.jpg")  # JPEG changes numbers
    assert "format that keeps numbers" in str(told(tmp_path / "photo.jpg"))

    Image.fromarray(VALUES).save(tmp_path / "whole.png")
    data = (tmp_path / "whole.png").read_bytes()
    pixels = data.index(b"IDAT")
    for cut in range(pixels + 8):  # before the pixels are complete
        (tmp_path / "cut.png").write_bytes(data[:cut])
        assert told(tmp_path / "cut.png").field == "file"
    (tmp_path / "text.png").write_text("not an image")
    assert told(tmp_path / "text.png").field == "file"


def test_it_travels_between_processes() -> None:
    bad = pickle.loads(pickle.dumps(BadAnnotation("a.png", "a", "size", "3×4")))
    assert (bad.path, bad.image_id, bad.field, bad.why) == ("a.png", "a", "size", "3×4")
    assert str(bad) == "cannot read a.png: annotation of image a, size: 3×4"


def test_renumber_looks_up_every_pixel() -> None:
    table = np.full(256, -1, np.int16)
    table[[0, 1, 2, 7, 255]] = [IGNORE, 0, 1, 2, IGNORE]
    out = renumber(VALUES, table, path="m.png", image_id="m")
    assert out.dtype == np.uint8
    assert out.tolist() == [[255, 0, 1], [255, 2, 255]]


@pytest.mark.parametrize("number", [9, 300, -1])
def test_an_unknown_number_is_told_with_its_place(number: int) -> None:
    table = np.full(256, -1, np.int16)
    table[[0, 1, 2, 255]] = [0, 1, 2, IGNORE]
    values = np.zeros((3, 4), np.int32)
    values[1, 3] = values[2, 0] = number
    with pytest.raises(BadAnnotation) as caught:
        renumber(values, table, path="m.png", image_id="m")
    assert caught.value.field == "pixels"
    assert f"{number} at row 1, column 3 is not a number of this dataset (0 to 2, 255)" in str(caught.value)
