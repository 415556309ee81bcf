"""Opening datasets by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from visualtokens.data import (
    DigitScenes,
    ImageDataset,
    catalog,
    open_dataset,
    open_detection,
    open_segmentation,
)
from visualtokens.data.folder import ImageFolder
from visualtokens.errors import UserError


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_dataset_has_the_common_interface(tmp_path: Path, split: str) -> None:
    images, labels = np.zeros((2, 4, 4), np.uint8), np.array([0, 1])
    np.savez(tmp_path / "a.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    for each in ("train", "val"):
        (tmp_path / each / "a").mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / each / "a/1.png")
    for spec in ("digits", "digit_scenes:32x48", f"folder:{tmp_path}", f"npz:{tmp_path}/a.npz"):
        dataset = open_dataset(spec, split)  # type: ignore[arg-type]
        assert isinstance(dataset, ImageDataset)
        image, label = dataset[len(dataset) - 1]
        assert image.mode == "RGB"
        assert type(label) is int
        assert 0 <= label < len(dataset.classes)
        assert all(isinstance(name, str) for name in dataset.classes)
        assert dataset.path(0)
        reopened = open_dataset(dataset.spec, split)  # type: ignore[arg-type]
        assert (len(reopened), reopened.classes) == (len(dataset), dataset.classes)


def test_the_size_of_scenes_is_height_by_width() -> None:
    scenes = open_dataset("digit_scenes:48x64", "val", seed=4)
    assert isinstance(scenes, DigitScenes)
    assert (scenes.size, scenes.seed) == ((48, 64), 4)
    assert scenes[0][0].size == (64, 48)  # Pillow's order is width, height
    assert open_dataset("digit_scenes", "val").size == (128, 128)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("digit", "unknown dataset 'digit'; did you mean 'digits'"),
        ("digits:32", "digits has no options"),
        ("digit_scenes:32", "'32' is not a size; write HEIGHTxWIDTH"),
        ("digit_scenes:8x8", "size=8x8 leaves no room"),
        ("digit_scenes:99999x99999", "99999x99999 is more than 64,000,000 pixels"),
        ("npz", "names no path; write 'npz:/path'"),
        ("folder:/no/such/place", "/no/such/place does not exist"),
    ],
)
def test_invalid_names_are_rejected(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_dataset(spec, "train")


def test_a_path_without_its_kind_is_explained(tmp_path: Path) -> None:
    (tmp_path / "images/annotations").mkdir(parents=True)
    (tmp_path / "masked/masks").mkdir(parents=True)
    (tmp_path / "classes/train/cat").mkdir(parents=True)
    (tmp_path / "shards").mkdir()
    for name in ("x.npz", "x.CSV", "x.parquet", "shards/_info.json", "images/annotations/x.json", "x.jpg"):
        (tmp_path / name).touch()

    def hint(name: str, open: Callable[..., object] = open_dataset) -> str:
        with pytest.raises(UserError) as caught:
            open(str(tmp_path / name), "train")
        message = str(caught.value).replace(f"{tmp_path}/", "")
        return message.partition(" is a path without its kind; write ")[2]

    assert hint("classes") == "'folder:classes'"
    assert hint("x.npz") == "'npz:x.npz'"
    assert hint("x.CSV") == "'csv:x.CSV'"
    assert hint("x.parquet") == "'parquet:x.parquet'"
    assert hint("shards") == "'wds:shards'"
    assert hint("images") == hint("images/annotations/x.json") == "'coco:images' with --task detect"
    assert hint("images", open_detection) == "'coco:images'"
    assert hint("masked") == "'masks:masked' with --task segment"
    assert hint("masked", open_segmentation) == "'masks:masked'"
    assert hint("x.npz", open_segmentation) == "'npz:x.npz' with --task classify"


def test_a_dataset_of_another_task_is_explained() -> None:
    with pytest.raises(UserError, match="'pets:/x' is for --task segment; give it, or another --data"):
        open_dataset("pets:/x", "train")
    with pytest.raises(UserError, match="'voc:/x' is for --task segment or detect"):
        open_dataset("voc:/x", "train")
    with pytest.raises(UserError, match="'coco:/x' is for --task detect"):
        open_segmentation("coco:/x", "train")
    with pytest.raises(UserError, match="'folder:/x' is for --task classify"):
        open_detection("folder:/x", "train")


@pytest.mark.parametrize("spec", ["digits", "digit_scenes", "folder:.", "npz:x.npz"])
def test_an_unknown_split_is_rejected(spec: str) -> None:
    with pytest.raises(UserError, match="unknown split 'validation'; did you mean 'val'"):
        open_dataset(spec, "validation")  # type: ignore[arg-type]


def test_invalid_names_of_dense_datasets_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'coco:' names no path"):
        open_detection("coco:", "val")
    with pytest.raises(UserError, match="unknown detection dataset 'digits'"):
        open_detection("digits", "val")
    with pytest.raises(UserError, match="unknown segmentation dataset 'mask'; did you mean 'masks'"):
        open_segmentation("mask:/x", "train")
    with pytest.raises(UserError, match="'pets' names no path; write 'pets:/path'"):
        open_segmentation("pets", "train")
    with pytest.raises(UserError, match="does not exist"):
        open_segmentation(f"pets:{tmp_path}/no", "train")


def test_a_missing_test_split_is_rejected_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="digits has no test split, only train, val"):
        open_dataset("digits", "test")
    for scenes in (open_dataset, open_segmentation, open_detection):
        with pytest.raises(UserError, match="digit_scenes has no test split, only train, val"):
            scenes("digit_scenes", "test")
    with pytest.raises(UserError, match=f"lip:{tmp_path} has no test split, only train, val"):
        open_segmentation(f"lip:{tmp_path}", "test")
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/instances_val2017.json").touch()
    with pytest.raises(UserError, match="has no annotation file for test, only for val; looked for"):
        open_detection(f"coco:{tmp_path}", "test")


class Options(ImageFolder):
    """Keeps its options."""

    def __init__(
        self,
        root: str,
        split: str,
        *,
        number: int | None = None,
        share: float = 0.5,
        name: str = "",
        switch: bool = False,
        several: int | Sequence[int] = (),
    ) -> None:
        self.options = (number, share, name, switch, several)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(catalog, "CLASSIFICATION", {**catalog.CLASSIFICATION, "own": Options})
    return lambda **given: open_dataset("own:/x", "train", **given).options  # type: ignore[attr-defined]


def test_options_reach_the_constructor(options: Callable[..., Any]) -> None:
    assert options() == (None, 0.5, "", False, ())
    given = options(number=2, share=1, name=2017, switch=True, several=[1, 2])
    assert given == (2, 1.0, "2017", True, [1, 2])
    assert (type(given[1]), options(number=None)[0]) == (float, None)
    scenes = open_segmentation("digit_scenes:32x32", "val", length=3)
    assert len(scenes) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"numbr": 2}, "unknown option of own 'numbr'; did you mean 'number'"),
        ({"xyz": 2}, "choose from name, number, several, share, switch"),
        ({"number": 2.5}, "number=2.5 must be a whole number or null"),
        ({"number": True}, "number=True must be a whole number or null"),
        ({"share": "a"}, "share='a' must be a number"),
        ({"name": [1]}, r"name=\[1\] must be text"),
        ({"switch": "no"}, "switch='no' must be true or false"),
        ({"val_share": 0.2}, "val_share is no option of own, which has splits of its own; leave it out"),
        ({"root": "/"}, "unknown option of own 'root'"),
        ({"spec": "digits"}, "unknown option of own 'spec'"),
    ],
)
def test_wrong_options_are_rejected(options: Callable[..., Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        options(**given)


def test_options_that_no_user_sets_are_rejected() -> None:
    with pytest.raises(UserError, match="digits has no options; leave number out"):
        open_dataset("digits", "val", number=2)
    with pytest.raises(UserError, match="unknown option of digit_scenes 'size'; choose from length"):
        open_detection("digit_scenes", "val", size=(32, 32))
