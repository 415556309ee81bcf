"""Segmentation datasets on disk: images with masks of numbers or colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from visualtokens.data import BadImage, open_segmentation
from visualtokens.data.decode import BadAnnotation
from visualtokens.errors import UserError

from .helpers import save


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
    with pytest.raises(BadAnnotation, match=r"image e, pixels: the mask holds 0, 3, but 3 has no class"):
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


# Folders and splits.


@pytest.mark.parametrize("form", ["{part}/{split}", "{split}/{part}"])
def test_both_orders_of_split_and_part(tmp_path: Path, form: str) -> None:
    for i, split in enumerate(("train", "val", "test")):
        image, mask = (tmp_path / form.format(part=part, split=split) for part in ("images", "masks"))
        save(image / "a.jpg", mask / "a.png", [[0] * i + [1]])
    for i, split in enumerate(("train", "val", "test")):
        data = open_segmentation(f"masks:{tmp_path}", split, classes=["a", "b"])  # type: ignore[arg-type]
        assert data[0][1].tolist() == [[0] * i + [1]]
    with pytest.raises(UserError, match=r"val_share=0.5 has no effect: .* has a split val"):
        open_segmentation(f"masks:{tmp_path}", "train", classes=["a", "b"], val_share=0.5)


def test_a_test_split_needs_no_masks_until_it_is_opened(masks: Path) -> None:
    (masks / "images/test").mkdir()
    assert len(open_segmentation(f"masks:{masks}", "train")) == 2
    with pytest.raises(UserError, match="has no folder masks/test"):
        open_segmentation(f"masks:{masks}", "test")
    (masks / "images/test").rmdir()
    with pytest.raises(UserError, match="has no folder images/test or test/images"):
        open_segmentation(f"masks:{masks}", "test")


@pytest.mark.parametrize("below", ["", "/train"])
def test_a_share_is_held_out(tmp_path: Path, below: str) -> None:
    for i in range(10):
        save(tmp_path / f"images{below}/{i}.jpg", tmp_path / f"masks{below}/{i}.png", [[i % 2]])
    spec = f"masks:{tmp_path}"
    with pytest.raises(UserError, match=r"has no validation split; give --val_share 0.2 to hold out"):
        open_segmentation(spec, "val", classes=["a", "b"])
    given: dict[str, Any] = dict(classes=["a", "b"], val_share=0.3)
    train, val = (open_segmentation(spec, split, **given) for split in ("train", "val"))
    assert (len(train), len(val)) == (7, 3)
    assert not {train.path(i) for i in range(7)} & {val.path(i) for i in range(3)}
    assert [val.path(i) for i in range(3)] == [
        open_segmentation(spec, "val", **given).path(i) for i in range(3)
    ]
    with pytest.raises(UserError, match="has no folder images/test"):
        open_segmentation(spec, "test", **given)


def test_masks_with_a_suffix(tmp_path: Path) -> None:
    for split in ("train", "val"):
        save(tmp_path / f"images/{split}/a.jpg", tmp_path / f"masks/{split}/a_mask.png", [[0, 1]])
    spec = f"masks:{tmp_path}"
    with pytest.raises(UserError, match=r"a_mask.png has another ending, which --data_args.suffix gives"):
        open_segmentation(spec, "train", classes=["a", "b"])
    train = open_segmentation(spec, "train", classes=["a", "b"], suffix="_mask")
    assert train[0][1].tolist() == [[0, 1]]


def test_images_and_masks_in_one_folder(tmp_path: Path) -> None:
    for folder in ("train", "valid"):
        save(tmp_path / folder / "a.png", tmp_path / folder / "a_mask.png", [[0, 2]])
    (tmp_path / "train/_classes.csv").write_text("Pixel Value, Class\n0, background\n2, dog\n")
    val = open_segmentation(f"masks:{tmp_path}", "val", suffix="_mask")
    assert val.classes == ["background", "dog"]
    assert [Path(val.path(i)).name for i in range(len(val))] == ["a.png"]
    assert val[0][1].tolist() == [[0, 1]]
    (tmp_path / "val").mkdir()
    with pytest.raises(UserError, match=r"has both .*/val and .*/valid; rename one of them"):
        open_segmentation(f"masks:{tmp_path}", "train", suffix="_mask")


# What masks hold.

RED, GREEN, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 0)


@pytest.fixture
def coloured(tmp_path: Path) -> Path:
    (tmp_path / "classes.csv").write_text("name,r,g,b\ncar,255,0,0\ntree,0,255,0\n")
    for split in ("train", "val"):
        save(
            tmp_path / f"images/{split}/a.jpg", tmp_path / f"masks/{split}/a.png", [[RED, GREEN], [RED, RED]]
        )
    return tmp_path


def test_colours_are_classes(coloured: Path) -> None:
    train = open_segmentation(f"masks:{coloured}", "train")
    assert train.classes == ["car", "tree"]
    assert train.colours == [RED, GREEN]
    assert train[0][1].tolist() == [[0, 1], [0, 0]]
    (coloured / "classes.csv").unlink()
    by_name = open_segmentation(f"masks:{coloured}", "train", colors={"car": "#ff0000", "tree": "0,255,0"})
    assert (by_name.classes, by_name.colours) == (train.classes, train.colours)
    in_order = open_segmentation(f"masks:{coloured}", "train", classes=["a", "b"], colors=[RED, GREEN])
    assert in_order[0][1].tolist() == [[0, 1], [0, 0]]


def test_a_colour_without_a_class(coloured: Path) -> None:
    save(coloured / "images/train/a.jpg", coloured / "masks/train/a.png", [[RED, BLACK, (1, 2, 3), BLACK]])
    spec = f"masks:{coloured}"
    with pytest.raises(BadAnnotation) as caught:
        open_segmentation(spec, "train")[0]
    assert caught.value.path == str(coloured / "masks/train/a.png")
    assert caught.value.why == (
        "the colour 0,0,0 has no class (2 pixels; 3 pixels of 2 such colours, the first at row 0, column 1); "
        "expected 0,255,0 tree, 255,0,0 car; give it a class or add it to --data_args.ignore"
    )
    train = open_segmentation(spec, "train", ignore=["0,0,0", [1, 2, 3]])
    assert train[0][1].tolist() == [[0, 255, 255, 255]]
    with pytest.raises(UserError, match=r"ignore=\[0, 0, 0\] may be .* write '0,0,0' for the colour"):
        open_segmentation(spec, "train", ignore=[0, 0, 0])


def test_palettes_and_numbers_of_a_dataset_with_colours(coloured: Path) -> None:
    """A palette stands for its colours, in any order; grey numbers are positions in the list of classes."""
    image, mask = coloured / "images/train/a.jpg", coloured / "masks/train/a.png"
    save(image, mask, [[0, 1, 1]], palette=[GREEN, RED])
    train = open_segmentation(f"masks:{coloured}", "train")
    assert train[0][1].tolist() == [[1, 0, 0]]
    save(image, mask, [[0, 1, 255]])
    assert train[0][1].tolist() == [[0, 1, 255]]


def test_palettes_of_a_dataset_without_colours_are_numbers(masks: Path) -> None:
    save(masks / "images/train/b.jpg", masks / "masks/train/b.png", [[0, 2, 1]], palette=[RED, GREEN, BLACK])
    assert open_segmentation(f"masks:{masks}", "train")[1][1].tolist() == [[0, 2, 1]]


def test_colours_of_a_dataset_without_them_are_refused(masks: Path) -> None:
    save(masks / "images/train/b.jpg", masks / "masks/train/b.png", [[RED, GREEN, RED]])
    with pytest.raises(BadAnnotation, match=r"RGB holds colours; .* or give the colour of every class"):
        open_segmentation(f"masks:{masks}", "train")[1]


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_black_and_white_as_colours(tmp_path: Path, mode: str) -> None:
    mask = tmp_path / "masks/train/a.png"
    save(tmp_path / "images/train/a.jpg", mask, [[0, 255]])
    with Image.open(mask) as opened:
        opened.convert(mode).save(mask)
    (tmp_path / "labelmap.txt").write_text("# label:color_rgb:parts:actions\nno:0,0,0::\nyes:255,255,255::\n")
    assert open_segmentation(f"masks:{tmp_path}", "train")[0][1].tolist() == [[0, 1]]


def test_masks_of_0_and_255(masks: Path) -> None:
    """255 is ignored by default, which would leave one class of two: it has to be decided."""
    for name in ("b.png", "a/c.png"):
        with Image.open(masks / "masks/train" / name) as opened:
            size = opened.size[::-1]
        Image.fromarray(np.full(size, 255 * (name == "b.png"), np.uint8)).save(masks / "masks/train" / name)
    spec = f"masks:{masks}"
    with pytest.raises(
        UserError, match=r"hold 0 and 255, but 'b' is 1 .*mapping '\{0: a, 255: b\}', otherwise"
    ):
        open_segmentation(spec, "train", classes=["a", "b"])
    given = open_segmentation(spec, "train", classes=["a", "b"], mapping={0: "a", 255: "b"})
    assert given[1][1].tolist() == [[1, 1, 1], [1, 1, 1]]
    given = open_segmentation(spec, "train", classes=["a", "b"], ignore=255)
    assert set(given[1][1].ravel().tolist()) == {255}
    assert len(open_segmentation(spec, "train")) == 2  # of three classes


def test_numbers_are_mapped_and_ignored(masks: Path) -> None:
    spec = f"masks:{masks}"
    merged = open_segmentation(spec, "train", mapping={"left wall": "wall", "right wall": "wall"})
    assert merged.classes == ["road", "wall"]
    assert merged[1][1].tolist() == [[0, 1, 1], [255, 0, 0]]
    kept = open_segmentation(spec, "train", ignore="road")
    assert kept.classes == ["left wall", "right wall"]
    assert kept[1][1].tolist() == [[255, 0, 1], [255, 255, 255]]
    (masks / "classes.txt").unlink()
    by_number = open_segmentation(spec, "train", mapping={"2": "b", "0": "a", "1": "a"}, ignore=[255])
    assert by_number.classes == ["b", "a"]
    assert by_number[1][1].tolist() == [[1, 1, 0], [255, 1, 1]]
