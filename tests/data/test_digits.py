from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from visualtokens.data.arrays import Digits
from visualtokens.errors import UserError


def test_split_covers_every_digit_once() -> None:
    train, val = Digits("train"), Digits("val")
    assert (len(train), len(val)) == (1437, 360)
    assert sorted([*train.rows, *val.rows]) == list(range(1797))
    names = {d.path(i) for d in (train, val) for i in range(len(d))}
    assert len(names) == 1797


def test_split_is_stratified() -> None:
    target = load_digits().target
    of_val = np.bincount(Digits("val").labels, minlength=10)
    np.testing.assert_allclose(of_val, np.bincount(target) * 0.2, atol=1)


def test_split_never_changes() -> None:
    assert Digits("val").rows[:8].tolist() == [21, 24, 28, 34, 35, 37, 39, 42]


def test_items_are_scikit_learns_images_in_full_range() -> None:
    source = load_digits()
    for split in ("train", "val"):
        dataset = Digits(split)
        for index in (0, 17, len(dataset) - 1):
            image, label = dataset[index]
            row = int(dataset.path(index).removeprefix("digits[").removesuffix("]"))
            expected = np.rint(source.images[row] / 16 * 255)  # 0..16 to 0..255
            assert isinstance(image, Image.Image)
            assert (image.mode, image.size) == ("RGB", (8, 8))
            np.testing.assert_array_equal(np.asarray(image), np.repeat(expected[..., None], 3, 2))
            assert label == source.target[row]
    assert Digits("train").classes == list("0123456789")


def test_iteration_ends() -> None:
    assert sum(1 for _ in Digits("val")) == 360


def test_unknown_split() -> None:
    with pytest.raises(UserError, match="unknown split 'vall'; did you mean 'val'"):
        Digits("vall")  # type: ignore[arg-type]
