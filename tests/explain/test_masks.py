from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visualtokens.data import BadImage
from visualtokens.errors import UserError
from visualtokens.explain.importance import find_mask, read_mask

from .stubs import preprocess


def written(path: Path, values: list[list[int]]) -> Path:
    Image.fromarray(np.array(values, dtype=np.uint8)).save(path)
    return path


def test_trimaps_and_black_and_white(tmp_path: Path) -> None:
    trimap = written(tmp_path / "a.png", [[1, 2], [3, 1]])
    assert read_mask(trimap, preprocess(2, 2), (2, 2)).tolist() == [[1, 0], [-1, 1]]
    white = written(tmp_path / "b.png", [[255, 0], [0, 255]])
    assert read_mask(white, preprocess(2, 2), (2, 2)).tolist() == [[1, 0], [0, 1]]


def test_the_numbers_of_a_palette_count_and_not_its_colours(tmp_path: Path) -> None:
    indexed = Image.new("P", (2, 1))
    indexed.putdata([1, 2])
    indexed.putpalette([0, 0, 0, 200, 10, 10, 10, 200, 10])
    indexed.save(tmp_path / "a.png")
    assert read_mask(tmp_path / "a.png", preprocess(1, 2), (2, 1)).tolist() == [[1, 0]]


def test_a_mask_is_cropped_like_its_image(tmp_path: Path) -> None:
    """Of 8×4 pixels the model sees the middle 4×4, halved."""
    columns = [2, 2, 1, 1, 2, 2, 3, 3]
    path = written(tmp_path / "a.png", [columns] * 4)
    assert read_mask(path, preprocess(2, 2), (8, 4)).tolist() == [[1, 0], [1, 0]]


def test_what_is_no_mask(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="the value 77"):
        read_mask(written(tmp_path / "a.png", [[77, 1]]), preprocess(1, 2), (2, 1))
    with pytest.raises(BadImage, match="2×1 for an image of 3×3"):
        read_mask(written(tmp_path / "a.png", [[2, 1]]), preprocess(1, 2), (3, 3))
    (tmp_path / "b.png").write_text("no picture")
    with pytest.raises(BadImage, match="not a readable mask"):
        read_mask(tmp_path / "b.png", preprocess(1, 2), (2, 1))


def test_masks_are_found_by_split_class_and_name(tmp_path: Path) -> None:
    places = ["beagle_1.png", "beagle/beagle_1.png", "val/beagle/beagle_1.png"]
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
        assert find_mask("/data/val/beagle/beagle_1.jpg", tmp_path) == tmp_path / place
    (tmp_path / "photo.1.png").touch()
    assert find_mask("photo.1.jpg", tmp_path) == tmp_path / "photo.1.png"
    with pytest.raises(UserError, match=r"cat\.jpg has no mask in .*cat\.png"):
        find_mask("/x/cat.jpg", tmp_path)
