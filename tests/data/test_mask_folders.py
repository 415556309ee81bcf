"""Segmentation datasets on disk: every layout, with a few small images."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visualtokens.data import BadImage, open_segmentation
from visualtokens.data.decode import BadAnnotation
from visualtokens.data.mask_folders import ADE20K, COCO_STUFF, LIP, to_classes
from visualtokens.data.segmentation import IGNORE
from visualtokens.errors import UserError


def save(image: Path, mask: Path, values: list[list[int]], colour: str = "red") -> None:
    array = np.array(values, np.uint8)
    for path in (image, mask):
        path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (array.shape[1], array.shape[0]), colour).save(image)
    Image.fromarray(array).save(mask)


@pytest.fixture
def masks(tmp_path: Path) -> Path:
    (tmp_path / "classes.txt").write_text("road\nleft wall\n\nright wall\n")
    save(tmp_path / "images/train/b.jpg", tmp_path / "masks/train/b.png", [[0, 1, 2], [255, 0, 0]])
    save(tmp_path / "images/train/a/c.PNG", tmp_path / "masks/train/a/c.png", [[2]], "blue")
    save(tmp_path / "images/val/d.webp", tmp_path / "masks/val/d.png", [[1, 1]])
    return tmp_path


def test_folder_of_masks(masks: Path) -> None:
    train, val = (open_segmentation(f"masks:{masks}", split) for split in ("train", "val"))
    assert train.classes == val.classes == ["road", "left wall", "right wall"]
    assert train.spec == f"masks:{masks}"
    assert train.keep_ratio
    assert (len(train), len(val)) == (2, 1)
    assert [Path(train.path(i)).name for i in range(2)] == ["c.PNG", "b.jpg"]
    image, mask = train[1]
    assert (image.mode, image.size) == ("RGB", (3, 2))
    assert mask.dtype == np.uint8
    assert mask.tolist() == [[0, 1, 2], [255, 0, 0]]
    assert train[0][0].getpixel((0, 0)) == (0, 0, 255)


def test_unusable_items_are_reported_on_access(masks: Path) -> None:
    save(masks / "images/train/e.png", masks / "masks/train/e.png", [[0, 3]])
    Image.new("RGB", (5, 1)).save(masks / "images/train/b.jpg")
    (masks / "images/train/a/c.PNG").write_bytes(b"not an image")
    train = open_segmentation(f"masks:{masks}", "train")
    with pytest.raises(BadImage, match="known format") as caught:
        train[0]
    assert not isinstance(caught.value, BadAnnotation)
    with pytest.raises(BadAnnotation, match=r"3×2, but .*b.jpg is 5×1") as caught:
        train[1]
    assert (caught.value.image_id, caught.value.field) == ("b", "size")
    assert caught.value.path == str(masks / "masks/train/b.png")
    with pytest.raises(BadAnnotation, match=r"image e, pixels: 3 at row 0, column 1 .*\(0 to 2, 255\)"):
        train[2]


def test_an_image_without_a_mask_is_rejected(masks: Path) -> None:
    (masks / "masks/train/b.png").unlink()
    with pytest.raises(
        UserError, match=r"1 of 2 images in .* have no mask in .*, such as .*b.jpg; add .*b.png"
    ):
        open_segmentation(f"masks:{masks}", "train")


def test_two_images_of_the_same_name_are_rejected(masks: Path) -> None:
    Image.new("RGB", (1, 1)).save(masks / "images/train/b.png")
    with pytest.raises(UserError, match="have the same name; rename one"):
        open_segmentation(f"masks:{masks}", "train")


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "classes.txt does not exist; write the name"), ("", "names 0 classes"), ("a\nb\na", "'a' twice")],
)
def test_classes_must_be_named(masks: Path, text: str | None, message: str) -> None:
    (masks / "classes.txt").unlink()
    if text is not None:
        (masks / "classes.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        open_segmentation(f"masks:{masks}", "train")


def test_links_are_followed_unless_they_lead_back(
    masks: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pool = tmp_path_factory.mktemp("pool")
    save(pool / "images/f.png", pool / "masks/f.png", [[1]])
    for part in ("images", "masks"):
        (masks / part / "train/linked").symlink_to(pool / part)
    train = open_segmentation(f"masks:{masks}", "train")
    assert [pair.id for pair in train.pairs] == ["a/c", "b", "linked/f"]
    assert train[2][1].tolist() == [[1]]
    (masks / "images/train/back").symlink_to("a")
    with pytest.raises(UserError, match=r"the link .*images/train/back leads to .*/a, which is also listed"):
        open_segmentation(f"masks:{masks}", "train")


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    image, mask = tmp_path / "images/x.jpg", tmp_path / "annotations/trimaps/x.png"
    save(image, mask, [[1, 2, 3]])
    for file in (image, mask):
        os.rename(file, os.fsencode(file.parent) + b"/\xe9" + os.fsencode(file.suffix))
    (tmp_path / "annotations/trainval.txt").write_bytes(b"\xe9 1 2 1\n")
    train = open_segmentation(f"pets:{tmp_path}", "train")
    assert os.fsencode(train.path(0)) == os.fsencode(tmp_path) + b"/images/\xe9.jpg"
    assert train[0][1].tolist() == [[0, 1, 2]]


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no folder images/training"):
        open_segmentation(f"ade20k:{tmp_path}", "train")


def test_pets_in_class_folders(tmp_path: Path) -> None:
    for split in ("train", "val"):
        save(tmp_path / split / "pug/pug_1.jpg", tmp_path / f"trimaps/{split}/pug/pug_1.png", [[1, 2, 3]])
    train = open_segmentation(f"pets:{tmp_path}", "train")
    assert train.classes == ["pet", "background", "border"]
    assert train[0][1].tolist() == [[0, 1, 2]]


def test_pets_as_published(tmp_path: Path) -> None:
    for name in ("pug_1", "pug_2", "cat_3"):
        save(tmp_path / f"images/{name}.jpg", tmp_path / f"annotations/trimaps/{name}.png", [[1, 2, 3]])
    (tmp_path / "annotations/trimaps/._pug_1.png").write_bytes(b"\0")
    (tmp_path / "images/odd.mat").write_bytes(b"\0")
    Image.new("RGB", (2, 2)).save(tmp_path / "images/unlisted.jpg")
    (tmp_path / "annotations/trainval.txt").write_text("#Image CLASS\npug_2 1 2 1\ncat_3 2 1 1\n")
    (tmp_path / "annotations/test.txt").write_text("pug_1 1 2 1\n")
    train, val = (open_segmentation(f"pets:{tmp_path}", split) for split in ("train", "val"))
    assert [Path(train.path(i)).stem for i in range(len(train))] == ["cat_3", "pug_2"]
    assert [Path(val.path(i)).stem for i in range(len(val))] == ["pug_1"]


def test_ade20k(tmp_path: Path) -> None:
    for part in ("training", "validation"):
        save(tmp_path / f"images/{part}/ADE_1.jpg", tmp_path / f"annotations/{part}/ADE_1.png", [[0, 1, 150]])
    val = open_segmentation(f"ade20k:{tmp_path}", "val")
    assert len(val.classes) == 150
    assert val[0][1].tolist() == [[255, 0, 149]]
    save(tmp_path / "images/training/ADE_1.jpg", tmp_path / "annotations/training/ADE_1.png", [[151]])
    with pytest.raises(BadAnnotation, match=r"151 .*\(0 to 150\)"):
        open_segmentation(f"ade20k:{tmp_path}", "train")[0]


@pytest.mark.parametrize(
    ("images", "maps"),
    [("train2017", "stuffthingmaps/train2017"), ("images/train2017", "annotations/train2017")],
)
def test_cocostuff_ignores_things(tmp_path: Path, images: str, maps: str) -> None:
    save(
        tmp_path / images / "000000000009.jpg", tmp_path / maps / "000000000009.png", [[0, 90, 91, 181, 255]]
    )
    train = open_segmentation(f"cocostuff:{tmp_path}", "train")
    assert len(train.classes) == 91
    assert train[0][1].tolist() == [[255, 255, 0, 90, 255]]
    assert (train.classes[0], train.classes[90]) == ("banner", "wood")


@pytest.mark.parametrize("outer", ["", "TrainVal_{0}/TrainVal_{0}/"])
def test_lip(tmp_path: Path, outer: str) -> None:
    images = tmp_path / outer.format("images") / "val_images/7_1.jpg"
    save(images, tmp_path / outer.format("parsing_annotations") / "val_segmentations/7_1.png", [[0, 14, 19]])
    val = open_segmentation(f"lip:{tmp_path}", "val")
    assert len(val.classes) == 20
    assert not val.keep_ratio
    assert val[0][1].tolist() == [[0, 14, 19]]


def test_class_names_are_complete_and_unique() -> None:
    for names, count in ((ADE20K, 150), (COCO_STUFF, 91), (LIP, 20)):
        assert len(names) == len(set(names)) == count
    assert (ADE20K[0], ADE20K[12], ADE20K[149]) == ("wall", "person", "flag")


def test_every_number_of_a_mask_is_mapped_to_its_class() -> None:
    table = np.full(256, -1, np.int16)
    table[[0, 1, 2, 7, 255]] = [IGNORE, 0, 1, 2, IGNORE]
    values = np.array([[0, 1, 2], [255, 7, 0]], np.uint8)
    classes = to_classes(values, table, path="m.png", image_id="m")
    assert classes.dtype == np.uint8
    assert classes.tolist() == [[255, 0, 1], [255, 2, 255]]


@pytest.mark.parametrize("number", [9, 300, -1])
def test_an_invalid_number_is_reported_with_its_position(number: int) -> None:
    table = np.full(256, -1, np.int16)
    table[[0, 1, 2, 255]] = [0, 1, 2, IGNORE]
    values = np.zeros((3, 4), np.int32)
    values[1, 3] = values[2, 0] = number
    with pytest.raises(BadAnnotation) as caught:
        to_classes(values, table, path="m.png", image_id="m")
    assert caught.value.field == "pixels"
    assert f"{number} at row 1, column 3 is not a number of this dataset (0 to 2, 255)" in str(caught.value)
