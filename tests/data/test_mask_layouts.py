"""Segmentation datasets in the layouts of the public ones, with a few small images."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visualtokens.data import open_segmentation
from visualtokens.data.decode import BadAnnotation
from visualtokens.data.published_classes import (
    ADE20K,
    CAMVID,
    CAMVID_COLOURS,
    CITYSCAPES,
    COCO_STUFF,
    LIP,
    VOC,
    voc_colour,
)
from visualtokens.errors import UserError

from .helpers import save


def names(dataset: object) -> list[str]:
    return [pair.id for pair in dataset.pairs]  # type: ignore[attr-defined]


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
    with pytest.raises(
        BadAnnotation, match=r"holds 151, but 151 has no class .*expected 1 to 150 and, ignored, 0"
    ):
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
    for classes, count in ((ADE20K, 150), (COCO_STUFF, 91), (LIP, 20), (VOC, 21), (CITYSCAPES, 19)):
        assert len(classes) == len(set(classes)) == count
    assert (ADE20K[0], ADE20K[12], ADE20K[149]) == ("wall", "person", "flag")


def test_ade20k_has_no_masks_of_the_test_split(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no test split, only train, val"):
        open_segmentation(f"ade20k:{tmp_path}", "test")


# CamVid.


def test_camvid_with_numbers(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        save(tmp_path / f"{split}/0001TP_1.png", tmp_path / f"{split}annot/0001TP_1.png", [[0, 8, 10, 11]])
    for split in ("train", "val", "test"):
        data = open_segmentation(f"camvid:{tmp_path}", split)  # type: ignore[arg-type]
        assert data.classes == list(CAMVID)
        assert data.classes[8] == "Car"
        assert data[0][1].tolist() == [[0, 8, 10, 255]]
        assert data.colours is not None
        assert data.colours[8] == (64, 0, 128)


@pytest.fixture
def original_camvid(tmp_path: Path) -> Path:
    """Five photographs with masks of all 32 colours."""
    colours = [list(CAMVID_COLOURS.values())]
    for i in range(5):
        image = tmp_path / f"701_StillsRaw_full/0001TP_{i}.png"
        save(image, tmp_path / f"LabeledApproved_full/0001TP_{i}_L.png", colours)
    return tmp_path


def test_original_camvid(original_camvid: Path) -> None:
    """The 32 colours become 11 classes, by the published lists."""
    for split, listed in (("train", "0001TP_0\n0001TP_3\n"), ("val", "x/0001TP_1.png y/0001TP_1_L.png\n")):
        (original_camvid / f"{split}.txt").write_text(listed)
    (original_camvid / "test.txt").write_text("0001TP_2.png\n0001TP_4_L.png\n")
    train, val, test = (open_segmentation(f"camvid:{original_camvid}", s) for s in ("train", "val", "test"))
    assert (names(train), names(val), names(test)) == (
        ["0001TP_0", "0001TP_3"],
        ["0001TP_1"],
        ["0001TP_2", "0001TP_4"],
    )
    assert train.classes == list(CAMVID)
    found = dict(zip(CAMVID_COLOURS, train[0][1][0].tolist(), strict=True))
    expected = {part: i for i, parts in enumerate(CAMVID.values()) for part in parts}
    assert found == expected | {"Void": 255}
    assert (found["SUVPickupTruck"], found["Child"]) == (8, 9)
    assert sorted(expected) == sorted(set(CAMVID_COLOURS) - {"Void"})
    (original_camvid / "val.txt").write_text("0001TP_9\n")
    with pytest.raises(UserError, match=r"1 of 1 names in .*val.txt have no image or no mask.*'0001TP_9'"):
        open_segmentation(f"camvid:{original_camvid}", "val")


def test_original_camvid_without_lists(original_camvid: Path) -> None:
    spec = f"camvid:{original_camvid}"
    with pytest.raises(UserError, match=r"has no validation split; give --val_share 0.2"):
        open_segmentation(spec, "train")
    train, val = (open_segmentation(spec, s, val_share=0.4) for s in ("train", "val"))
    assert (len(train), len(val)) == (3, 2)
    assert sorted(names(train) + names(val)) == [f"0001TP_{i}" for i in range(5)]
    with pytest.raises(UserError, match="has no test split"):
        open_segmentation(spec, "test", val_share=0.4)


def test_camvid_names_its_colours_in_a_file(original_camvid: Path) -> None:
    lines = [f"{r} {g} {b}\t\t{name}" for name, (r, g, b) in CAMVID_COLOURS.items()]
    lines[5] = "1 2 3\tCar"
    (original_camvid / "label_colors.txt").write_text("\n".join(lines))
    save(
        original_camvid / "701_StillsRaw_full/0001TP_0.png",
        original_camvid / "LabeledApproved_full/0001TP_0_L.png",
        [[(1, 2, 3), (128, 64, 128)]],
    )
    train = open_segmentation(f"camvid:{original_camvid}", "train", val_share=0.2)
    assert train[names(train).index("0001TP_0")][1].tolist() == [[8, 3]]
    (original_camvid / "label_colors.txt").write_text("Car\n")
    with pytest.raises(UserError, match=r"label_colors.txt has no colour for 'Car'"):
        open_segmentation(f"camvid:{original_camvid}", "train", val_share=0.2)
    (original_camvid / "label_colors.txt").write_text("1 2 3 Carr\n")
    with pytest.raises(UserError, match=r"unknown label of CamVid in .*'Carr'; did you mean 'Car'"):
        open_segmentation(f"camvid:{original_camvid}", "train", val_share=0.2)


def test_camvid_with_colours_in_folders(tmp_path: Path) -> None:
    for split in ("train", "val"):
        save(tmp_path / f"{split}/a.png", tmp_path / f"{split}_labels/a_L.png", [[(0, 0, 0), (64, 0, 128)]])
    rows = [f"{name},{r},{g},{b}" for name, (r, g, b) in CAMVID_COLOURS.items()]
    (tmp_path / "class_dict.csv").write_text("\n".join(["name,r,g,b", *rows]))
    val = open_segmentation(f"camvid:{tmp_path}", "val", mapping={"Car": "Vehicle"}, ignore="Sky")
    assert val.classes == ["Vehicle" if name == "Car" else name for name in CAMVID if name != "Sky"]
    assert val[0][1].tolist() == [[255, 7]]


# Cityscapes.


@pytest.mark.parametrize(
    ("ending", "values"), [("labelIds", [[0, 7, 26, 33, 29]]), ("labelTrainIds", [[255, 0, 13, 18, 255]])]
)
def test_cityscapes(tmp_path: Path, ending: str, values: list[list[int]]) -> None:
    for split, city in (("train", "bonn"), ("train", "ulm"), ("val", "lindau")):
        stem = f"{split}/{city}/{city}_000000_000019"
        image = tmp_path / f"leftImg8bit/{stem}_leftImg8bit.png"
        save(image, tmp_path / f"gtFine/{stem}_gtFine_{ending}.png", values)
        save(image, tmp_path / f"gtFine/{stem}_gtFine_instanceIds.png", [[9] * 5])
    train = open_segmentation(f"cityscapes:{tmp_path}", "train")
    assert names(train) == ["bonn/bonn_000000_000019", "ulm/ulm_000000_000019"]
    assert train.classes == list(CITYSCAPES)
    assert train[1][1].tolist() == [[255, 0, 13, 18, 255]]
    assert (train.classes[13], train.colours and train.colours[13]) == ("car", (0, 0, 142))
    assert len(open_segmentation(f"cityscapes:{tmp_path}", "val")) == 1


def test_cityscapes_with_other_masks(tmp_path: Path) -> None:
    stem = "train/bonn/bonn_000000_000019"
    image = tmp_path / f"leftImg8bit/{stem}_leftImg8bit.png"
    save(image, tmp_path / f"gtCoarse/{stem}_gtCoarse_labelIds.png", [[7, 34]])
    coarse = open_segmentation(f"cityscapes:{tmp_path}", "train", suffix="_gtCoarse_labelIds")
    with pytest.raises(BadAnnotation, match=r"holds 7, 34, but 34 has no class \(1 pixel, .*column 1\)"):
        coarse[0]
    with pytest.raises(UserError, match="suffix='_color': write _gtFine_labelIds"):
        open_segmentation(f"cityscapes:{tmp_path}", "train", suffix="_color")
    with pytest.raises(UserError, match="has no folder gtFine/train"):
        open_segmentation(f"cityscapes:{tmp_path}", "train")


# VOC.


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    base = tmp_path / "VOCdevkit/VOC2012"
    palette = [voc_colour(i) for i in range(256)]
    for i in range(5):
        name = f"2007_{i:06}"
        mask = base / f"SegmentationClass/{name}.png"
        save(base / f"JPEGImages/{name}.jpg", mask, [[0, 7, 20, 255]], palette=palette)
        with Image.open(mask) as opened:
            assert opened.mode == "P"
    Image.new("RGB", (4, 1)).save(base / "JPEGImages/2007_999999.jpg")  # without a mask, as most are
    lists = base / "ImageSets/Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("2007_000000\n2007_000001\n2007_000004\n")
    (lists / "val.txt").write_text("2007_000002\n2007_000003\n")
    return tmp_path


@pytest.mark.parametrize("below", ["", "VOCdevkit", "VOCdevkit/VOC2012"])
def test_voc(voc: Path, below: str) -> None:
    train, val = (open_segmentation(f"voc:{voc / below}", split) for split in ("train", "val"))
    assert (len(train), len(val)) == (3, 2)
    assert train.classes == list(VOC)
    assert val[0][1].tolist() == [[0, 7, 20, 255]]
    assert train.colours is not None
    assert train.colours[:3] == [(0, 0, 0), (128, 0, 0), (0, 128, 0)]
    assert (voc_colour(20), voc_colour(255)) == ((0, 64, 128), (224, 224, 192))


def test_voc_with_one_list(voc: Path) -> None:
    lists = voc / "VOCdevkit/VOC2012/ImageSets/Segmentation"
    with pytest.raises(UserError, match=r"val_share=0.5 has no effect: .*train.txt lists the images"):
        open_segmentation(f"voc:{voc}", "train", val_share=0.5)
    for name in ("train", "val"):
        (lists / f"{name}.txt").unlink()
    (lists / "trainval.txt").write_text("".join(f"2007_{i:06}\n" for i in range(4)))
    train, val = (open_segmentation(f"voc:{voc}", split, val_share=0.5) for split in ("train", "val"))
    assert (len(train), len(val)) == (2, 2)
    assert "2007_000004" not in names(train) + names(val)


def test_options_without_effect_are_refused(voc: Path) -> None:
    with pytest.raises(UserError, match=r"classes=\['a'\] has no effect on voc:.*; leave it out"):
        open_segmentation(f"voc:{voc}", "train", classes=["a"])
    with pytest.raises(UserError, match="suffix='_x' has no effect on voc:"):
        open_segmentation(f"voc:{voc}", "train", suffix="_x")


def test_classes_of_a_published_dataset_are_merged_and_ignored(tmp_path: Path) -> None:
    save(tmp_path / "val/pug/1.jpg", tmp_path / "trimaps/val/pug/1.png", [[1, 2, 3]])
    val = open_segmentation(f"pets:{tmp_path}", "val", ignore="border", mapping={"pet": "animal"})
    assert val.classes == ["animal", "background"]
    assert val[0][1].tolist() == [[0, 1, 255]]
    assert np.array_equal(open_segmentation(f"pets:{tmp_path}", "val", ignore=[3, 1])[0][1], [[255, 0, 255]])
