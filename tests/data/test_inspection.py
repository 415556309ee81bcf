"""Checking datasets: counts, bad files and warnings."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.squares import (
    CLASSES,
    draw_squares,
    save,
    write_pennfudan,
    write_squares,
    write_voc,
    write_yolo,
)
from visualtokens.data import check, open_splits
from visualtokens.data.check_report import Spread
from visualtokens.errors import UserError


def noise(seed: int, size: tuple[int, int] = (16, 12)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), np.uint8))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """12 cats and 2 dogs for training, 1 each for validation."""
    for i in range(12):
        save(noise(i, (20 + i, 30)), tmp_path / f"train/cat/{i:02}.jpg")
    for i in range(2):
        save(noise(100 + i), tmp_path / f"train/dog/{i}.png")
    for i, name in enumerate(("cat", "dog")):
        save(noise(200 + i), tmp_path / f"val/{name}/{i}.png")
    return tmp_path


def test_classification(photos: Path) -> None:
    report = check(f"folder:{photos}")
    assert (report.task, report.classes) == ("classify", ("cat", "dog"))
    train, val = report.splits["train"], report.splits["val"]
    assert (train.images, train.decoded, train.images_of_class, train.partial) == (14, 14, (12, 2), False)
    assert val.images_of_class == (1, 1)
    assert train.formats == {"JPEG": 12, "PNG": 2}
    widths = [20 + i for i in range(12)] + [16, 16]
    assert train.width == Spread(16, float(np.median(widths)), 31)
    assert (train.height, train.pixels, train.objects) == (Spread(12, 30, 30), None, None)
    assert list(report.absent) == ["test"]
    assert report.bad == ()
    assert report.warnings == ("1 class (dog) in fewer than 10 training images",)
    assert json.loads(json.dumps(report.to_dict()))["splits"]["train"]["images_of_class"] == [12, 2]


def test_text(photos: Path) -> None:
    lines = check(f"folder:{photos}").text().splitlines()
    assert lines[:5] == [
        f"folder:{photos}: classification, 2 classes",
        "",
        "split  images  decoded  width: min / median / max  height        formats",
        "train      14       14  16 / 24.5 / 31             12 / 30 / 30  JPEG 12, PNG 2",
        "val         2        2  16 / 16 / 16               12 / 12 / 12  PNG 2",
    ]
    assert lines[5] == f"no test: {photos} has no test/ folder, only train/, val/"
    assert lines[7:] == [
        "class  train images  share  val images  share",
        "cat              12  85.7%           1  50.0%",
        "dog               2  14.3%           1  50.0%",
        "balance: train has 6 times as many images of cat as of dog",
        "",
        "warnings",
        "  1 class (dog) in fewer than 10 training images",
        "",
        "no bad files",
    ]


def test_classes_of_the_same_size_are_balanced(tmp_path: Path) -> None:
    for i, name in enumerate(("cat", "dog")):
        for split in ("train", "val"):
            save(noise(i), tmp_path / f"{split}/{name}/{i}.png")
    text = check(f"folder:{tmp_path}").text()
    assert "\nbalance: train has the same number of images of every class\n" in text


def test_bad_files_and_suspicious_images(photos: Path) -> None:
    broken = photos / "train/cat/03.jpg"
    broken.write_bytes(broken.read_bytes()[:-100])  # the header is intact
    (photos / "val/cat/0.png").write_bytes(b"no image")
    shutil.copy(photos / "train/dog/0.png", photos / "val/dog/other.png")
    shutil.copy(photos / "train/dog/0.png", photos / "train/dog/again.png")
    save(noise(7, (100, 20)), photos / "train/dog/wide.png")
    report = check(f"folder:{photos}")
    assert [(bad.split, bad.path) for bad in report.bad] == [
        ("train", str(broken)),
        ("val", str(photos / "val/cat/0.png")),
    ]
    assert "truncated" in report.bad[0].reason
    assert report.splits["train"].decoded == 15
    dog = photos / "train/dog"
    assert report.warnings[1:] == (
        f"train holds 1 image more than once, such as {dog / '0.png'} and {dog / 'again.png'}",
        f"train and val have 1 image in common, such as {dog / '0.png'} and {photos / 'val/dog/other.png'}",
        f"train has 1 image with one side more than 4 times the other, such as {dog / 'wide.png'}",
    )
    assert f"bad files (2)\n  train: {broken}: " in report.text()
    many = dataclasses.replace(report, bad=report.bad * 11)
    assert many.text().endswith("\n  and 2 more; --json lists all")


def test_limit_decodes_some_and_reads_the_headers_of_others(photos: Path) -> None:
    broken = photos / "train/cat/03.jpg"
    broken.write_bytes(broken.read_bytes()[:-100])
    (photos / "train/cat/04.jpg").write_bytes(b"no image")
    report = check(f"folder:{photos}", limit=2)
    train = report.splits["train"]
    assert (train.decoded, train.images, sum(train.formats.values())) == (2, 14, 13)
    assert train.images_of_class == (12, 2)  # known without reading
    assert [bad.path for bad in report.bad] == [str(photos / "train/cat/04.jpg")]
    with pytest.raises(UserError, match="limit=0 must be at least 1"):
        check(f"folder:{photos}", limit=0)


def test_limit_of_annotations(tmp_path: Path) -> None:
    report = check(write_squares(tmp_path), limit=3)
    train = report.splits["train"]
    assert (train.partial, train.decoded, train.images) == (True, 3, 16)
    assert "counted on the decoded images of train and val only" in report.text()
    assert not any("fewer than" in warning for warning in report.warnings)


def expected_objects(split: str, train: int, val: int) -> list[list[tuple[int, int]]]:
    """Label and area of every object of every image."""
    drawn = draw_squares(train, val)
    return [[(s.label, s.side**2) for s in squares] for name, _, _, squares in drawn if name == split]


@pytest.mark.parametrize("write", [write_squares, write_yolo, write_voc])
def test_detection(tmp_path: Path, write: object) -> None:
    task = "detect" if write is write_voc else None  # Pascal VOC has masks for segmentation as well
    report = check(write(tmp_path), task=task)  # type: ignore[operator]
    assert report.task == "detect"
    for split in ("train", "val"):
        images = expected_objects(split, 16, 4)
        found = report.splits[split].objects
        assert found is not None
        flat = [each for image in images for each in image]
        for i, name in enumerate(report.classes):
            label = CLASSES.index(name)
            assert found.of_class[i] == sum(label == other for other, _ in flat)
            showing = sum(any(label == other for other, _ in image) for image in images)
            assert report.splits[split].images_of_class[i] == showing
        small = sum(area < 32**2 for _, area in flat)
        assert found.of_size == {"small": small, "medium": len(flat) - small, "large": 0}
        assert found.per_image == Spread.of([len(image) for image in images])
        assert (found.images_without, found.excluded) == (1, 0)
    assert (report.without_masks == "") == (write is write_squares)


def test_masks_are_used_where_all_objects_have_them(tmp_path: Path) -> None:
    spec = write_yolo(tmp_path, polygons=True)
    (tmp_path / "labels/train/2.txt").write_text("9 .1 .1 .5 .1 .5 .5\n")  # no class has this number
    report = check(spec)
    assert report.without_masks == ""
    assert [bad.path for bad in report.bad] == [str(tmp_path / "labels/train/2.txt")]
    (tmp_path / "labels/train/3.txt").write_text("0 .5 .5 .1 .1\n")
    report = check(spec)
    assert report.without_masks.startswith(
        f"on 1 of 16 training images, first {tmp_path / 'labels/train/3.txt'}"
    )
    assert len(report.bad) == 1
    assert f"boxes without masks: {report.without_masks}" in report.text()


def test_every_invalid_label_file_is_listed_with_any_limit(tmp_path: Path) -> None:
    spec = write_yolo(tmp_path)
    for i in (1, 4, 6):
        (tmp_path / f"labels/train/{i}.txt").write_text("0 .5 .5\n")
    for limit in (None, 1):
        report = check(spec, limit=limit)
        assert [bad.path for bad in report.bad] == [
            str(tmp_path / f"labels/train/{i}.txt") for i in (1, 4, 6)
        ]


def test_excluded_objects_and_classes_that_training_lacks(tmp_path: Path) -> None:
    spec = write_squares(tmp_path)
    file = tmp_path / "annotations/instances_val2017.json"
    document = json.loads(file.read_text())
    document["annotations"][0]["category_id"] = 3
    document["annotations"][1]["iscrowd"] = 1
    file.write_text(json.dumps(document))
    report = check(spec)
    objects = report.splits["val"].objects
    assert objects is not None
    assert (sum(objects.of_class), objects.excluded) == (5, 1)
    assert "1 class (never there) in no training image" in report.warnings
    assert "1 class (never there) in val, but not in train" in report.warnings


def test_segmentation(tmp_path: Path) -> None:
    masks = {"train": np.zeros((4, 10, 10), np.uint8), "val": np.zeros((1, 10, 10), np.uint8)}
    masks["train"][0, :, :6], masks["train"][1] = 1, 255
    masks["val"][0] = 255
    for split, several in masks.items():
        for i, mask in enumerate(several):
            save(noise(i + len(several), (10, 10)), tmp_path / f"images/{split}/{i}.png")
            save(Image.fromarray(mask), tmp_path / f"masks/{split}/{i}.png")
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    report = check(f"masks:{tmp_path}")
    pixels = report.splits["train"].pixels
    assert report.task == "segment"
    assert pixels is not None
    assert (pixels.of_class, pixels.ignored) == ((240, 60, 0), 100)
    assert report.splits["train"].images_of_class == (3, 1, 0)
    assert "100% of the pixels of val are ignored" in report.warnings
    text = report.text().splitlines()
    assert "b             15.0%       1        0.0%       0" in text
    assert "ignored pixels: train 25.0%, val 100.0%" in text
    save(Image.fromarray(np.full((10, 10), 7, np.uint8)), tmp_path / "masks/val/0.png")
    (bad,) = check(f"masks:{tmp_path}").bad
    assert bad.split == "val"
    assert "the mask holds 7, but 7 has no class" in bad.reason


def test_arrays_and_val_share(tmp_path: Path) -> None:
    labels = np.arange(24) % 2
    images = np.random.default_rng(0).integers(0, 255, (24, 8, 8, 3), np.uint8)
    images[3] = images[0]
    np.savez(
        tmp_path / "a.npz", x_train=images[:20], y_train=labels[:20], x_val=images[20:], y_val=labels[20:]
    )
    report = check(f"npz:{tmp_path / 'a.npz'}")
    assert report.splits["train"].images_of_class == (10, 10)
    assert report.splits["train"].formats == {}
    assert "train holds 1 image more than once" in report.warnings[0]
    spec = write_pennfudan(tmp_path / "penn", images=10)
    assert list(check(spec).absent) == ["val", "test"]
    assert [split.images for split in check(spec, val_share=0.3).splits.values()] == [7, 3]


def test_shards(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    for split in ("train", "validation"):
        with webdataset.TarWriter(str(tmp_path / f"x-{split}-0.tar")) as writer:
            for i in range(3):
                stream = io.BytesIO()
                noise(i + len(split)).save(stream, "PNG")
                png = b"no image" if i == 1 else stream.getvalue()
                writer.write({"__key__": f"{split}{i}", "png": png, "cls": str(i % 2).encode()})
    info = {
        "splits": {
            s: {"name": s, "num_samples": 3, "filenames": [f"x-{s}-0.tar"], "shard_lengths": [3]}
            for s in ("train", "validation")
        },
        "num_classes": 2,
    }
    (tmp_path / "_info.json").write_text(json.dumps(info))
    report = check(f"wds:{tmp_path}")
    assert report.splits["train"].images_of_class == (2, 0)
    assert [bad.split for bad in report.bad] == ["train", "val"]


def test_tasks_are_guessed(tmp_path: Path) -> None:
    assert open_splits("digit_scenes").task == "classify"
    assert open_splits("digit_scenes", task="segment").classes[0] == "background"
    assert open_splits(write_pennfudan(tmp_path)).task == "detect"
    with pytest.raises(
        UserError, match="voc has annotations for several tasks; choose one: --task segment or"
    ):
        open_splits("voc:x")
    with pytest.raises(UserError, match="unknown task 'detction'; did you mean 'detect'"):
        open_splits("digits", task="detction")
    with pytest.raises(UserError, match="unknown dataset 'pets5'"):
        open_splits("pets5:x")


def test_a_split_of_other_classes_is_left_out(tmp_path: Path) -> None:
    spec = write_squares(tmp_path)
    file = tmp_path / "annotations/instances_val2017.json"
    file.write_text(file.read_text().replace('"bright"', '"light"'))
    absent = check(spec).absent["val"]
    assert absent.startswith("its classes are ['light', 'dark', 'never there'], but those of train ['bright'")
