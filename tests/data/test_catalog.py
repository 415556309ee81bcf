from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visualtokens.data import DigitScenes, ImageDataset, open_dataset
from visualtokens.errors import UserError


@pytest.fixture
def specs(tmp_path: Path) -> list[str]:
    images, labels = np.zeros((2, 4, 4), np.uint8), np.array([0, 1])
    np.savez(tmp_path / "a.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / split / "a/1.png")
    return ["digits", "digit_scenes", "digit_scenes:32x48", f"folder:{tmp_path}", f"npz:{tmp_path}/a.npz"]


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_kind_keeps_the_contract(specs: list[str], split: str) -> None:
    for spec in specs:
        dataset = open_dataset(spec, split)  # type: ignore[arg-type]
        assert isinstance(dataset, ImageDataset)
        assert len(dataset) >= 1
        image, label = dataset[len(dataset) - 1]
        assert isinstance(image, Image.Image)
        assert image.mode == "RGB"
        assert type(label) is int
        assert 0 <= label < len(dataset.classes)
        assert all(isinstance(name, str) for name in dataset.classes)
        assert dataset.path(0)
        reopened = open_dataset(dataset.spec, split)  # type: ignore[arg-type]
        assert (len(reopened), reopened.classes) == (len(dataset), dataset.classes)


def test_size_of_scenes_is_height_by_width() -> None:
    scenes = open_dataset("digit_scenes:48x64", "val", seed=4)
    assert isinstance(scenes, DigitScenes)
    assert scenes.size == (48, 64)
    assert scenes.seed == 4
    assert scenes[0][0].size == (64, 48)  # Pillow's order is width, height


def test_the_seed_does_not_move_the_digits() -> None:
    first, other = open_dataset("digits", "val", seed=0), open_dataset("digits", "val", seed=9)
    assert [first.path(i) for i in range(len(first))] == [other.path(i) for i in range(len(other))]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("digit", "unknown dataset 'digit'; did you mean 'digits'"),
        ("imagenet", "unknown dataset 'imagenet'"),
        ("digits:32", "digits has no options"),
        ("digit_scenes:32", "'32' is not a size; write HEIGHTxWIDTH"),
        ("digit_scenes:axb", "'axb' is not a size"),
        ("digit_scenes:8x8", "size=8x8 leaves no room"),
        ("folder:", "names no path; write 'folder:/path'"),
        ("npz", "names no path; write 'npz:/path'"),
        ("folder:/no/such/place", "/no/such/place does not exist"),
        ("npz:/no/such.npz", "/no/such.npz is not a file"),
    ],
)
def test_unusable_specs(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_dataset(spec, "train")


def test_a_path_without_its_kind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"write 'folder:{tmp_path}'"):
        open_dataset(str(tmp_path), "train")


@pytest.mark.parametrize("spec", ["digits", "digit_scenes", "folder:.", "npz:x.npz"])
def test_unknown_split(spec: str) -> None:
    with pytest.raises(UserError, match="unknown split 'validation'; did you mean 'val'"):
        open_dataset(spec, "validation")  # type: ignore[arg-type]


def test_scikit_learn_is_not_loaded_before_it_is_needed() -> None:
    code = "import sys, visualtokens.data; sys.exit('sklearn' in sys.modules or 'matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
