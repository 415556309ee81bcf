"""YOLO's layouts: objects, where files are looked for, and the messages for invalid ones."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.squares import CLASSES, HEIGHT, WIDTH, save, write_squares, write_yolo
from visualtokens.data import open_detection
from visualtokens.data.decode import BadAnnotation
from visualtokens.data.yolo import YoloObjects
from visualtokens.errors import UserError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_yolo(tmp_path / "data", train=4, val=2)
    return tmp_path / "data"


@pytest.mark.parametrize("polygons", [False, True])
def test_objects_equal_those_of_the_same_data_in_cocos_layout(tmp_path: Path, polygons: bool) -> None:
    spec, coco = write_yolo(tmp_path / "yolo", polygons=polygons), write_squares(tmp_path / "coco")
    for split in ("train", "val"):
        dataset = open_detection(spec, split, masks=polygons)  # type: ignore[arg-type]
        reference = open_detection(coco, split, masks=polygons)  # type: ignore[arg-type]
        assert dataset.classes == reference.classes == CLASSES
        position = {Path(reference.path(i)).name: i for i in range(len(reference))}
        assert len(dataset) == len(reference)
        for index in range(len(dataset)):
            image, objects = dataset[index]
            expected_image, expected = reference[position[Path(dataset.path(index)).name]]
            assert np.array_equal(image, expected_image)
            torch.testing.assert_close(objects.boxes, expected.boxes, atol=1e-4, rtol=0)
            assert objects.labels.tolist() == expected.labels.tolist()
            torch.testing.assert_close(objects.area, expected.area, atol=0.1, rtol=0)
            assert not objects.crowd.any()
            assert (objects.masks is None) == (not polygons)
            if objects.masks is not None:
                assert torch.equal(objects.masks, expected.masks)


def test_a_polygon_has_the_box_of_its_points(root: Path) -> None:
    (root / "labels/train/1.txt").write_text("1 0.1 0.5 0.6 0.25 0.3 0.75\n")
    boxes = YoloObjects(root, "train", masks=False)[1][1].boxes
    torch.testing.assert_close(boxes, torch.tensor([[0.1 * WIDTH, 16, 0.6 * WIDTH, 48]]))


def test_an_image_without_a_label_file_has_no_objects(root: Path) -> None:
    dataset = YoloObjects(root, "train", masks=False)
    assert not dataset.label_files[0].exists()
    _, objects = dataset[0]
    assert (len(objects), objects.boxes.shape) == (0, (0, 4))
    shutil.rmtree(root / "labels")
    with pytest.raises(UserError, match=r"none of the 4 images .* has a label file; .*labels/train/0.txt"):
        YoloObjects(root, "train")


def test_boxes_need_a_detector_of_boxes(root: Path) -> None:
    with pytest.raises(BadAnnotation, match=r"line 1, values: a box without a mask; .*--model faster_rcnn"):
        open_detection(f"yolo:{root}", "train")


def test_boxes_of_zero_area_are_dropped_with_a_warning(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "labels/train/1.txt").write_text("0 .5 .5 0 .1\n\n1 .5 .5 .1 .1\n")
    with caplog.at_level(logging.WARNING):
        dataset = YoloObjects(root, "train", masks=False)
    assert dataset[1][1].labels.tolist() == [1]
    assert f"1 box of zero area dropped, the first in {root / 'labels/train/1.txt'}, line 1" in caplog.text


INVALID = {
    "3 0.5 0.5 0.1 0.1": "line 2, class: '3' is not a class of {yaml} (0 to 2)",
    "-1 0.5 0.5 0.1 0.1": "line 2, class: '-1'",
    "cat 0.5 0.5 0.1 0.1": "line 2, class: 'cat'",
    "0.5 0.5 0.5 0.1 0.1": "line 2, class: '0.5'",
    "0 0.5 0.5 0.1": "line 2, values: 4 values; expected 'class cx cy w h'",
    "0 0.5 0.5 0.1 0.1 0.9": "line 2, values: 6 values",
    "0 0.5 x 0.1 0.1": "line 2, coordinates: 'x' is not a number",
    "0 0.5 nan 0.1 0.1": "line 2, coordinates: 'nan' is not a number",
    "0 1e999 0.5 0.1 0.1": "line 2, coordinates: '1e999' is not a number",
    "0 0.5 0.5 -0.1 0.1": "line 2, w and h: '0.5 0.5 -0.1 0.1' is not a box: its sides are negative",
    "0 40 32 8 8": "line 2, cx cy w h: '40 32 8 8' are not shares of the image (0 to 1); divide pixels",
    "0 1.5 0.5 0.1 0.1": "line 2, cx cy w h: '1.5 0.5 0.1 0.1' does not lie in the image",
    "0 0 0 9 9 1 1": "line 2, polygon: '0 0 9 9 1 1' are not shares of the image",
    "0 " + "0 0 1 1 " * 1000: "line 2, polygon: ",
    "0 .1 .1 .2 .2 .3 .3 .4": "line 2, values: 8 values",
    "0 \x80 .1 .2 .2": "line 2, coordinates",
}


@pytest.mark.parametrize("line", INVALID, ids=range(len(INVALID)))
def test_an_invalid_line_is_reported_by_file_line_and_field(root: Path, line: str) -> None:
    file = root / "labels/train/1.txt"
    file.write_text(f"0 .5 .5 .1 .1\n{line}\n", encoding="latin-1")
    with pytest.raises(BadAnnotation) as caught:
        open_detection(f"yolo:{root}", "train", masks=False)
    message = str(caught.value)
    assert message.startswith(f"cannot read {file}: annotation of image 1, ")
    assert INVALID[line].format(yaml=root / "data.yaml") in message
    assert len(message) < 400


def test_without_strict_an_invalid_file_raises_when_its_image_is_read(root: Path) -> None:
    for number in (1, 2):
        (root / f"labels/train/{number}.txt").write_text("9 .5 .5 .1 .1\n")
    with pytest.raises(BadAnnotation, match=r"\(1 more images have invalid annotations; vtok data check"):
        open_detection(f"yolo:{root}", "train", masks=False)
    dataset = open_detection(f"yolo:{root}", "train", masks=False, strict=False)
    assert len(dataset) == 4
    assert len(dataset[3][1]) == 2
    for _ in range(2):
        with pytest.raises(BadAnnotation, match=r"1.txt: annotation of image 1, line 1, class: '9'"):
            dataset[1]


def test_the_number_of_objects_and_the_size_of_files_are_limited(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = root / "labels/train/1.txt"
    file.write_text("0 .5 .5 .1 .1\n" * 10_001)
    with pytest.raises(BadAnnotation, match="lines: 10,001 objects, more than 10,000"):
        YoloObjects(root, "train", masks=False)
    file.write_text("0 .1 .1 .1 .2 .2 .2\n" * 3)
    monkeypatch.setattr("visualtokens.data.annotations.MAX_MASK_BYTES", 2 * HEIGHT * WIDTH)
    others = [f for f in (root / "labels/train").iterdir() if f != file]
    for other in others:
        other.unlink()
    with pytest.raises(BadAnnotation, match="polygons: 3 masks of 5,120 pixels take more than 10,240 bytes"):
        YoloObjects(root, "train")[1]
    with file.open("wb") as stream:
        stream.truncate(2**24 + 1)
    with pytest.raises(BadAnnotation, match=r"file: .* has 17 MB, more than the 17 MB that are read"):
        YoloObjects(root, "train")


# Layouts.


def labelled(root: Path, image: str, label: str, line: str = "0 .5 .5 .5 .5") -> None:
    save(Image.new("RGB", (8, 8)), root / image)
    (root / label).parent.mkdir(parents=True, exist_ok=True)
    (root / label).write_text(line)


def opened(spec: Path | str, split: str = "train", **options: object) -> list[str]:
    """The names of the images, all of which must have an object."""
    dataset = open_detection(f"yolo:{spec}", split, masks=False, **options)  # type: ignore[arg-type]
    assert all(len(dataset[i][1]) == 1 for i in range(len(dataset)))
    return [Path(dataset.path(i)).name for i in range(len(dataset))]


def test_layout_of_coco128(tmp_path: Path) -> None:
    """Its path is where the author had it; train and val are the same images."""
    labelled(tmp_path / "coco128", "images/train2017/a.jpg", "labels/train2017/a.txt")
    content = "path: ../datasets/coco128\ntrain: images/train2017\nval: images/train2017\ntest:\n"
    content += "names:\n  0: person\n  1: bicycle\ndownload: https://example.org/coco128.zip\n"
    (tmp_path / "coco128/coco128.yaml").write_text(content)
    for spec in (tmp_path / "coco128", tmp_path / "coco128/coco128.yaml"):
        assert opened(spec) == opened(spec, "val") == ["a.jpg"]
    (tmp_path / "coco128/coco128.yaml").rename(tmp_path / "coco128.yaml")  # beside the folder
    assert opened(tmp_path / "coco128.yaml") == ["a.jpg"]
    with pytest.raises(UserError, match="has no test split; of train, val and test it has: train, val"):
        opened(tmp_path / "coco128.yaml", "test")


def test_layout_of_roboflow(tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        labelled(tmp_path, f"{split}/images/{split}.jpg", f"{split}/labels/{split}.txt")
    (tmp_path / "data.yaml").write_text(
        "train: ../train/images\nval: ../valid/images\ntest: ../test/images\nnc: 1\nnames: ['mole']\n"
    )
    found = [opened(tmp_path, split) for split in ("train", "val", "test")]
    assert found == [["train.jpg"], ["valid.jpg"], ["test.jpg"]]
    (tmp_path / "data.yaml").unlink()
    (tmp_path / "classes.txt").write_text("mole\n")
    assert [opened(tmp_path, split) for split in ("train", "val", "test")] == found


def test_lists_of_images_and_several_folders(tmp_path: Path) -> None:
    for name in ("x/images/a", "x/images/b", "y/images/c"):
        labelled(tmp_path, f"{name}.jpg", f"{name.replace('images', 'labels')}.txt")
    (tmp_path / "train.txt").write_text("./x/images/b.jpg\n\nx/images/a.jpg\n")
    (tmp_path / "data.yaml").write_text("train: [train.txt, y/images]\nval: y\nnames: [a]\n")
    assert opened(tmp_path) == ["b.jpg", "a.jpg", "c.jpg"]
    assert opened(tmp_path, "val") == ["c.jpg"]


def test_labels_beside_the_images_without_splits(tmp_path: Path) -> None:
    names = [f"{i}.jpg" for i in range(10)]
    for name in names:
        labelled(tmp_path, name, f"{Path(name).stem}.txt")
    (tmp_path / "classes.txt").write_text("a\nb\n")
    assert opened(tmp_path) == names
    with pytest.raises(UserError, match=r"has no validation split; hold out a share: --val_share 0.2"):
        opened(tmp_path, "val")
    parts = [opened(tmp_path, split, val_share=0.3) for split in ("train", "val")]
    assert sorted(parts[0] + parts[1]) == names
    assert len(parts[1]) == 3
    shutil.copytree(tmp_path, tmp_path.parent / "elsewhere")
    assert opened(tmp_path.parent / "elsewhere", "val", val_share=0.3) == parts[1]
    with pytest.raises(UserError, match="has no test split"):
        opened(tmp_path, "test")


def test_val_share_is_refused_where_a_validation_split_exists(root: Path) -> None:
    with pytest.raises(UserError, match="has a validation split, images/val; leave val_share out"):
        opened(root, val_share=0.2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- 1", "must have entries train, val and names"),
        ("train: images/train", "has no names; add the names of the classes"),
        ("train: images/train\nnames: 3", "names is 3; give a list of words"),
        ("train: images/train\nnames: [a, true]", "give a list of words, in quotes if necessary"),
        ("train: images/train\nnames: [a, a]", "names the class 'a' twice"),
        ("train: images/train\nnames: {1: a, 2: b}", r"names has the numbers \[1, 2\]; they must count from"),
        ("train: images/train\nnames: [a]\nnc: 2", "nc is 2, but names has 1 class;"),
        ("train: images/train\nnc: many", "nc is 'many'; give the number of classes"),
        ("train: images/train\nnc: 1000000000", "has 1,000,000,000 classes; give from 1 to 100,000"),
        ("train: 3\nnames: [a]", "train is 3; give a folder of images"),
        ("train: nowhere\nnames: [a]", "train: there is no 'nowhere'; looked for"),
        ("train: /etc\nnames: [a]", "'/etc' lies outside .*--data_args.allow_outside true"),
        ("train: labels\nnames: [a]", "labels in .* holds no images"),
        ("train: ../../etc\nnames: [a]", "there is no '../../etc'; looked for .*/data/etc$"),
        ("train: list.txt\nnames: [a]", r"list.txt, line 1: '../a.jpg' lies outside"),
        ("train: long.txt\nnames: [a]", r"long.txt, line 1: 'a{56}… is too long for the name of a file"),
        (f"train: {'a' * 300}\nnames: [a]", r"train: there is no 'a{300}'; looked for"),
        ("path: 3\ntrain: images/train\nnames: [a]", "path is 3; give the folder"),
        ("train: images/train\nnames: [a]\nkpt_shape: [17, 3]", "key points"),
        ("train: &x [*x]\nnames: [a]", "data file '.*' has more than 100,000 values"),
        ("val: images/val\nnames: [a]", "has no train split; of train, val and test it has: val"),
    ],
)
def test_unusable_yaml_files(root: Path, content: str, message: str) -> None:
    (root / "data.yaml").write_text(content)
    (root / "list.txt").write_text("../a.jpg\n")
    (root / "long.txt").write_text("a" * 300)
    with pytest.raises(UserError, match=message):
        YoloObjects(root, "train", masks=False)


def test_names_may_be_numbers_or_absent(root: Path) -> None:
    for names, expected in (
        ("names: [0, 1, two]", ["0", "1", "two"]),
        ("names: {2: c, 0: a, '1': b}", ["a", "b", "c"]),
        ("nc: 3", ["class_0", "class_1", "class_2"]),
    ):
        (root / "data.yaml").write_text(f"train: images/train\n{names}")
        assert YoloObjects(root, "train", masks=False).classes == expected


def test_images_outside_the_folder_are_opened_on_request(root: Path, tmp_path: Path) -> None:
    (root / "images").rename(tmp_path / "images")
    (root / "labels").rename(tmp_path / "labels")
    (root / "data.yaml").write_text(f"path: {tmp_path}\ntrain: images/train\nnames: [a, b]\n")
    with pytest.raises(UserError, match="there is no 'images/train'"):
        YoloObjects(root, "train", masks=False)
    dataset = YoloObjects(root, "train", masks=False, allow_outside=True)
    assert [len(dataset[i][1]) for i in range(4)] == [0, 2, 2, 2]


def test_other_roots(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist; give the folder of a dataset or its data"):
        YoloObjects(tmp_path / "nowhere", "train")
    with pytest.raises(UserError, match=r"has neither a data.yaml nor a classes.txt"):
        YoloObjects(tmp_path, "train")
    for name in ("a.yaml", "b.yml"):
        (tmp_path / name).write_text("x: 1")
    with pytest.raises(
        UserError, match=f"several yaml files .a.yaml, b.yml.; name one, such as 'yolo:{tmp_path}"
    ):
        YoloObjects(tmp_path, "train")
