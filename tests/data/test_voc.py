"""Pascal VOC's layout: objects, splits, and the messages for invalid files."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.squares import HEIGHT, WIDTH, save, voc_object, write_squares, write_voc
from visualtokens.data import BadImage, open_detection
from visualtokens.data.decode import BadAnnotation
from visualtokens.data.voc import VocObjects
from visualtokens.errors import UserError

SIZE = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height></size>"
BOX = voc_object("dark", (1, 2, 30, 40))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_voc(tmp_path / "data", train=4, val=2)
    return tmp_path / "data"


def opened(root: Path, split: str = "train", **options: object) -> VocObjects:
    return VocObjects(root, split, **{"masks": False, **options})  # type: ignore[arg-type]


def stems(root: Path, split: str = "train", **options: object) -> list[str]:
    dataset = opened(root, split, **options)
    return [Path(dataset.path(i)).stem for i in range(len(dataset))]


def test_objects_equal_those_of_the_same_data_in_cocos_layout(tmp_path: Path) -> None:
    spec, coco = write_voc(tmp_path / "voc"), write_squares(tmp_path / "coco")
    for split in ("train", "val"):
        dataset = open_detection(spec, split, masks=False)  # type: ignore[arg-type]
        reference = open_detection(coco, split, masks=False)  # type: ignore[arg-type]
        assert dataset.classes == ["bright", "dark"]
        assert len(dataset) == len(reference)
        for index in range(len(dataset)):
            assert Path(dataset.path(index)).name == f"{split}_{Path(reference.path(index)).name}"
            (image, objects), (expected_image, expected) = dataset[index], reference[index]
            assert np.array_equal(image, expected_image)
            for ours, theirs in zip(objects.tensors(), expected.tensors(), strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["a" * 251, "/".join(["a"] * 1000)])
def test_names_that_no_file_can_have_are_refused(root: Path, name: str) -> None:
    file = root / "ImageSets/Main/train.txt"
    file.write_text(f"train_0\n{name}\n")
    with pytest.raises(UserError) as caught:
        opened(root)
    assert str(caught.value) == f"{file}: {name!r:.57}… is too long for the name of a file"


def test_masks_are_not_there(root: Path) -> None:
    with pytest.raises(UserError, match=r"has boxes without masks; train a detector .*--model faster_rcnn"):
        open_detection(f"voc:{root}", "train")


def write(root: Path, content: str, name: str = "train_1") -> Path:
    file = root / f"Annotations/{name}.xml"
    file.write_text(content)
    return file


def test_difficult_objects_are_excluded_unless_wanted(root: Path) -> None:
    boxes = BOX + voc_object("bright", (5, 5, 9, 9), difficult=1)
    write(root, f"<annotation>{SIZE}{boxes}</annotation>")
    assert opened(root)[1][1].crowd.tolist() == [False, True]
    assert opened(root, difficult=True)[1][1].crowd.tolist() == [False, False]


def test_parts_of_objects_are_ignored(root: Path) -> None:
    part = "<part><name>head</name><bndbox><xmin>3</xmin></bndbox></part></object>"
    write(root, f"<annotation>{SIZE}{BOX.replace('</object>', part)}</annotation>")
    assert opened(root).classes == ["bright", "dark"]
    assert opened(root)[1][1].boxes.tolist() == [[1, 2, 30, 40]]


def test_the_size_of_the_image_counts_where_none_is_annotated(root: Path) -> None:
    for size in ("", "<size><width>0</width><height>0</height></size>"):
        write(root, f"<annotation>{size}{BOX}</annotation>")
        assert opened(root)[1][1].boxes.tolist() == [[1, 2, 30, 40]]
    write(root, f"<annotation>{SIZE.replace(str(WIDTH), '79')}{BOX}</annotation>")
    dataset = opened(root)
    with pytest.raises(BadImage, match=r"is 80×64, but .*train_1.xml has 79×64 in 'size'"):
        dataset[1]


def test_classes_are_those_of_all_splits_or_given(root: Path) -> None:
    write(root, f"<annotation>{SIZE}{voc_object('cat', (0, 0, 4, 4))}</annotation>", "val_1")
    for split in ("train", "val"):
        assert opened(root, split).classes == ["bright", "cat", "dark"]
    assert opened(root, "val", classes=["cat"]).classes == ["cat"]
    assert opened(root, "val", classes="cat")[1][1].labels.tolist() == [0]  # one name, as typed
    with pytest.raises(BadAnnotation, match=r"object 1, name: 'bright' is none of the classes \['cat'\]"):
        opened(root, classes=["cat"])


def test_a_filename_replaces_the_name_of_the_xml_file(root: Path) -> None:
    (root / "JPEGImages/train_1.png").rename(root / "JPEGImages/photo.png")
    write(root, f"<annotation><filename>photo.jpg</filename>{SIZE}{BOX}</annotation>")
    assert stems(root) == ["train_0", "photo", "train_2", "train_3"]


INVALID = {
    "name": ("<object><bndbox/></object>", "object 2, name: is missing"),
    "corner": (BOX.replace("<xmin>2</xmin>", ""), "object 2, bndbox/xmin: None is not a number"),
    "text": (BOX.replace("<xmax>30<", "<xmax>wide<"), "object 2, bndbox/xmax: 'wide' is not a number"),
    "not finite": (BOX.replace("<ymax>40<", "<ymax>inf<"), "object 2, bndbox/ymax: 'inf' is not a number"),
    "order": (BOX.replace("<xmax>30<", "<xmax>0<"), "bndbox: [2.0, 3.0, 0.0, 40.0]: xmax is less than"),
    "beyond": (BOX.replace("<xmax>30<", "<xmax>3000<"), "does not lie in the image of 80×64 pixels"),
    "beside": (voc_object("dark", (90, 2, 95, 9)), "does not lie in the image of 80×64 pixels"),
    "difficult": (BOX.replace("<difficult>0<", "<difficult>2<"), "object 2, difficult: '2' is neither"),
    "many": (BOX * 10_000, "objects: 10,001 objects, more than 10,000"),
    "no xml": ("<object", "file: is not XML: "),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_file_is_reported_by_object_and_field(root: Path, case: str) -> None:
    second, expected = INVALID[case]
    file = write(root, f"<annotation>{SIZE}{BOX}{second}</annotation>")
    with pytest.raises(BadAnnotation) as caught:
        opened(root)
    assert str(caught.value).startswith(f"cannot read {file}: annotation of image train_1, ")
    assert expected in str(caught.value)
    dataset = opened(root, strict=False)
    assert len(dataset[2][1]) == 2
    with pytest.raises(BadAnnotation, match="train_1"):
        dataset[1]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("<size><width>x</width></size>", "size/width: 'x' is not a number of pixels"),
        ("<size><width>9</width><height>-1</height></size>", "size/height: '-1' is not a number"),
        ("<size><width>99999</width><height>99999</height></size>", "99999×99999 is more than 64 megapixels"),
    ],
)
def test_invalid_sizes(root: Path, size: str, message: str) -> None:
    write(root, f"<annotation>{size}{BOX}</annotation>")
    with pytest.raises(BadAnnotation, match=message):
        opened(root)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_document_types_are_refused(root: Path, encoding: str) -> None:
    entities = "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 30))
    content = f'<!DOCTYPE a [<!ENTITY a0 "x">{entities}]><annotation>{SIZE}&a29;</annotation>'
    (root / "Annotations/train_1.xml").write_bytes(content.encode(encoding))
    with pytest.raises(BadAnnotation, match=r"it declares a document type \(<!DOCTYPE …>\); remove"):
        opened(root)


def test_the_number_of_elements_is_limited(root: Path) -> None:
    deep = "<a>" * 600_000 + "</a>" * 600_000
    write(root, f"<annotation>{deep}</annotation>")
    with pytest.raises(BadAnnotation, match="file: it has more than 500,000 elements"):
        opened(root)
    write(root, f"<annotation>{SIZE}{deep[: 3 * 400_000]}{deep[-4 * 400_000 :]}{BOX}</annotation>")
    assert len(opened(root)[1][1]) == 1


def test_missing_files_are_reported(root: Path) -> None:
    (root / "Annotations/train_2.xml").unlink()
    with pytest.raises(BadAnnotation, match=r"train_2.xml: .* file: .*train_2.xml does not exist"):
        opened(root)
    write_image = root / "JPEGImages/train_1.png"
    write_image.unlink()
    with pytest.raises(
        BadAnnotation, match=r"filename: there is neither an image 'train_1' nor 'train_1.png'"
    ):
        opened(root)
    (root / "ImageSets/Main/train.txt").write_text("../../etc/passwd\n")
    with pytest.raises(UserError, match=r"'../../etc/passwd' lies outside the dataset"):
        opened(root)
    (root / "ImageSets/Main/train.txt").write_text("\n")
    with pytest.raises(UserError, match=r"train.txt lists no images"):
        opened(root)
    with pytest.raises(UserError, match="nowhere does not exist"):
        opened(root / "nowhere")
    (root / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty holds no .xml in Annotations, annotations or beside them"):
        opened(root / "empty")


# Splits.


def test_lists_of_trainval(root: Path) -> None:
    lists = root / "ImageSets/Main"
    both = [f"{split}_{i}" for split, count in (("train", 4), ("val", 2)) for i in range(count)]
    (lists / "trainval.txt").write_text("\n".join(f"{name}  1" for name in both))
    (lists / "train.txt").unlink()
    assert stems(root) == both[:4]
    (lists / "val.txt").unlink()
    assert stems(root) == both
    parts = [stems(root, split, val_share=0.5) for split in ("train", "val")]
    assert sorted(parts[0] + parts[1]) == sorted(both)
    assert len(parts[1]) == 3
    with pytest.raises(UserError, match=r"has no test split; expected .*ImageSets/Main/test.txt"):
        stems(root, "test")
    shutil.rmtree(root / "ImageSets")
    assert [stems(root, split, val_share=0.5) for split in ("train", "val")] == parts


def test_val_share_is_refused_where_a_validation_split_exists(root: Path) -> None:
    with pytest.raises(UserError, match="has a validation split of 2 images; leave val_share out"):
        opened(root, val_share=0.2)


def test_a_folder_for_each_split(tmp_path: Path) -> None:
    """As Roboflow exports it."""
    for split in ("train", "valid", "test"):
        save(Image.new("RGB", (WIDTH, HEIGHT)), tmp_path / split / f"{split}.jpg")
        (tmp_path / split / f"{split}.xml").write_text(f"<annotation>{SIZE}{BOX}</annotation>")
    assert [stems(tmp_path, split) for split in ("train", "val", "test")] == [["train"], ["valid"], ["test"]]


def test_images_and_annotations_in_one_folder_or_two(tmp_path: Path) -> None:
    save(Image.new("RGB", (WIDTH, HEIGHT)), tmp_path / "a.jpg")
    (tmp_path / "a.xml").write_text(f"<annotation>{SIZE}{BOX}</annotation>")
    assert stems(tmp_path) == ["a"]
    for folder, name in (("images", "a.jpg"), ("annotations", "a.xml")):
        (tmp_path / folder).mkdir()
        (tmp_path / name).rename(tmp_path / folder / name)
    assert stems(tmp_path) == ["a"]


def test_years_in_a_devkit(root: Path, tmp_path: Path) -> None:
    (tmp_path / "VOCdevkit").mkdir()
    root.rename(tmp_path / "VOCdevkit/VOC2012")
    assert len(opened(tmp_path / "VOCdevkit")) == len(opened(tmp_path)) == 4
    shutil.copytree(tmp_path / "VOCdevkit/VOC2012", tmp_path / "VOCdevkit/VOC2007")
    with pytest.raises(
        UserError, match=r"several datasets \(VOC2007, VOC2012\); name one, such as 'voc:.*07'"
    ):
        opened(tmp_path / "VOCdevkit")
