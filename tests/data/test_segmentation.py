"""The layouts of the segmentation datasets, each made small on disk."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visualtokens.data import BadImage
from visualtokens.data.segmentation import ADE20K, COCO_STUFF, LIP, mirrored_classes, open_segmentation
from visualtokens.data.segmentation_transforms import BadAnnotation
from visualtokens.errors import UserError

PETS = Path(__file__).parents[2] / "../shared/data/pets"


def put(image: Path, mask: Path, values: list[list[int]], colour: str = "red") -> None:
    array = np.array(values, np.uint8)
    for path in (image, mask):
        path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (array.shape[1], array.shape[0]), colour).save(image)
    Image.fromarray(array).save(mask)


@pytest.fixture
def masks(tmp_path: Path) -> Path:
    (tmp_path / "classes.txt").write_text("road\nleft wall\n\nright wall\n")
    put(tmp_path / "images/train/b.jpg", tmp_path / "masks/train/b.png", [[0, 1, 2], [255, 0, 0]])
    put(tmp_path / "images/train/a/c.PNG", tmp_path / "masks/train/a/c.png", [[2]], "blue")
    put(tmp_path / "images/val/d.webp", tmp_path / "masks/val/d.png", [[1, 1]])
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


def test_what_is_wrong_with_an_item_is_told_when_it_is_read(masks: Path) -> None:
    put(masks / "images/train/e.png", masks / "masks/train/e.png", [[0, 3]])
    Image.new("RGB", (5, 1)).save(masks / "images/train/b.jpg")
    (masks / "images/train/a/c.PNG").write_bytes(b"no image")
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


def test_an_image_without_a_mask_is_told_at_once(masks: Path) -> None:
    (masks / "masks/train/b.png").unlink()
    with pytest.raises(
        UserError, match=r"1 of 2 images in .* have no mask in .*, such as .*b.jpg; add .*b.png"
    ):
        open_segmentation(f"masks:{masks}", "train")


def test_two_images_of_one_name(masks: Path) -> None:
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


def test_unknown_and_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown segmentation dataset 'mask'; did you mean 'masks'"):
        open_segmentation("mask:/x", "train")
    with pytest.raises(UserError, match="'pets' names no path; write 'pets:/path'"):
        open_segmentation("pets", "train")
    with pytest.raises(UserError, match="does not exist"):
        open_segmentation(f"pets:{tmp_path}/no", "train")
    with pytest.raises(UserError, match="has no folder images/training"):
        open_segmentation(f"ade20k:{tmp_path}", "train")
    with pytest.raises(UserError, match="unknown split 'test'"):
        open_segmentation("digit_scenes", "test")  # type: ignore[arg-type]


def test_pets_in_class_folders(tmp_path: Path) -> None:
    for split in ("train", "val"):
        put(tmp_path / split / "pug/pug_1.jpg", tmp_path / f"trimaps/{split}/pug/pug_1.png", [[1, 2, 3]])
    train = open_segmentation(f"pets:{tmp_path}", "train")
    assert train.classes == ["pet", "background", "border"]
    assert train[0][1].tolist() == [[0, 1, 2]]


def test_pets_as_published(tmp_path: Path) -> None:
    for name in ("pug_1", "pug_2", "cat_3"):
        put(tmp_path / f"images/{name}.jpg", tmp_path / f"annotations/trimaps/{name}.png", [[1, 2, 3]])
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
        put(tmp_path / f"images/{part}/ADE_1.jpg", tmp_path / f"annotations/{part}/ADE_1.png", [[0, 1, 150]])
    val = open_segmentation(f"ade20k:{tmp_path}", "val")
    assert len(val.classes) == 150
    assert val[0][1].tolist() == [[255, 0, 149]]
    put(tmp_path / "images/training/ADE_1.jpg", tmp_path / "annotations/training/ADE_1.png", [[151]])
    with pytest.raises(BadAnnotation, match=r"151 .*\(0 to 150\)"):
        open_segmentation(f"ade20k:{tmp_path}", "train")[0]


@pytest.mark.parametrize(
    ("images", "maps"),
    [("train2017", "stuffthingmaps/train2017"), ("images/train2017", "annotations/train2017")],
)
def test_cocostuff_ignores_things(tmp_path: Path, images: str, maps: str) -> None:
    put(tmp_path / images / "000000000009.jpg", tmp_path / maps / "000000000009.png", [[0, 90, 91, 181, 255]])
    train = open_segmentation(f"cocostuff:{tmp_path}", "train")
    assert len(train.classes) == 91
    assert train[0][1].tolist() == [[255, 255, 0, 90, 255]]
    assert (train.classes[0], train.classes[90]) == ("banner", "wood")


@pytest.mark.parametrize("outer", ["", "TrainVal_{}/", "TrainVal_{0}/TrainVal_{0}/"])
def test_lip(tmp_path: Path, outer: str) -> None:
    images = tmp_path / outer.format("images") / "val_images/7_1.jpg"
    put(images, tmp_path / outer.format("parsing_annotations") / "val_segmentations/7_1.png", [[0, 14, 19]])
    val = open_segmentation(f"lip:{tmp_path}", "val")
    assert len(val.classes) == 20
    assert not val.keep_ratio
    assert val[0][1].tolist() == [[0, 14, 19]]


def test_names_are_complete_and_different() -> None:
    for names, count in ((ADE20K, 150), (COCO_STUFF, 91), (LIP, 20)):
        assert len(names) == len(set(names)) == count
    assert (ADE20K[0], ADE20K[12], ADE20K[149]) == ("wall", "person", "flag")


def test_what_classes_are_in_a_mirror() -> None:
    there = mirrored_classes(LIP)
    assert {LIP[i]: LIP[j] for i, j in enumerate(there) if i != j} == {
        "left arm": "right arm",
        "right arm": "left arm",
        "left leg": "right leg",
        "right leg": "left leg",
        "left shoe": "right shoe",
        "right shoe": "left shoe",
    }
    assert [there[there[i]] for i in range(20)] == list(range(20))
    assert mirrored_classes(["leftover", "rightover", "left eye", "Left-arm", "Right-arm"]) == [0, 1, 2, 4, 3]
    for names in (ADE20K, COCO_STUFF):
        assert mirrored_classes(names) == list(range(len(names)))


def test_digit_scenes_are_the_embedded_ones() -> None:
    scenes = open_segmentation("digit_scenes:48x64", "val", seed=3)
    assert scenes.classes == ["background", *"0123456789"]
    image, mask = scenes[2]
    assert image.size == (64, 48)
    scene = scenes.scenes.scene(2)  # type: ignore[attr-defined]
    assert mask.tolist() == scene.semantic.tolist()
    assert set(mask.ravel().tolist()) == {0, *(scene.labels + 1).tolist()}
    assert scenes.path(2) == "digit_scenes/val[2]"


@pytest.mark.skipif(not PETS.is_dir(), reason="the Pets are not here")
def test_the_real_trimaps() -> None:
    train, val = (open_segmentation(f"pets:{PETS}", split) for split in ("train", "val"))
    assert (len(train), len(val)) == (1110, 370)
    seen: Counter[int] = Counter()
    for i in range(0, 370, 37):
        image, mask = val[i]
        assert mask.shape == (image.height, image.width)
        seen.update(mask.ravel().tolist())
    assert set(seen) == {0, 1, 2}
    assert seen[1] > seen[0] > seen[2]
