"""``vtok train``, ``eval`` and ``predict`` for detection."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image

from tests.squares import CLASSES, write_pennfudan, write_squares, write_voc, write_yolo
from visualtokens.cli import main
from visualtokens.tasks.detect.detections import ImageDetections, truth

from .processes import files_limited_to

Vtok = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("squares")


@pytest.fixture(scope="module")
def data(root: Path) -> str:
    return write_squares(root / "data")


SMALL = ["--model_args.backbone", "resnet18", "--model_args.width", "16", "--size", "64", "--batch", "4"]
SMALL += ["--model_args.backbone_args", '{"channels": [8, 16, 16, 16]}', "--device", "cpu", "--lr", "0.002"]
SMALL += ["--model_args.hidden", "32", "--model_args.regions", "16"]


@pytest.fixture(scope="module")
def run(root: Path, data: str) -> str:
    out = str(root / "run")
    given = ["--data", data, "--out", out, "--epochs", "4"]
    assert main(["train", "--task", "detect", "--model", "mask_rcnn", *SMALL, *given]) == 0
    return out


def test_eval(vtok: Vtok, run: str, data: str) -> None:
    given = ("eval", "--checkpoint", run, "--data", data, "--device", "cpu")
    code, text, err = vtok(*given)
    assert (code, err) == (0, "")
    assert text.splitlines()[0] == "6 objects on 4 images"
    assert [line.split()[0] for line in text.splitlines()[3:5]] == ["boxes", "masks"]
    assert "never there" not in text
    document = json.loads(vtok(*given, "--json")[1])
    assert document["box_ap"] == document["boxes"]["ap"]
    assert document["boxes"]["by_class"][2] is None
    larger = json.loads(vtok(*given, "--size", "96", "--json")[1])
    assert larger["objects"] == 6
    code, _, err = vtok(*given, "--flip")
    assert (code, err) == (2, f"error: flip=True has no effect: {run} was trained to detect; leave it out\n")
    code, _, err = vtok("eval", "--checkpoint", run, "--data", "digit_scenes")
    assert code == 2
    assert "digit_scenes has 10 classes (0, 1, 2, …), but" in err


def test_header_states_backbone_and_sides(vtok_with_progress: Vtok, run: str, data: str) -> None:
    code, _, err = vtok_with_progress("eval", "--checkpoint", run, "--data", data, "--device", "cpu")
    assert code == 0
    model, task, read, _ = err.splitlines()
    assert model.startswith(f"model   mask_rcnn with backbone resnet18 of {run}, ")
    assert model.endswith(" M parameters, input with a short side of 64 and a long side of up to 107")
    assert (task, read) == ("task    detect, 3 classes", f"data    {data}, split val, 4 images")


def test_predict_draws_objects_above_the_score(vtok: Vtok, run: str, root: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    Image.new("RGB", (1, 1), "white").save(tmp_path / "1.png")
    images = (root / "data/val2017/1.png", tmp_path / "1.png", tmp_path / "broken.png")
    given = ("predict", *images, "--checkpoint", run, "--out", tmp_path / "out", "--device", "cpu", "--score")
    code, text, err = vtok(*given, "0.05")
    assert code == 1
    assert str(images[2]) in err
    document = json.loads(vtok(*given, "0.05", "--json")[1])
    first, second = document["predictions"]
    assert [Path(each["picture"]).name for each in (first, second)] == ["1_objects.png", "1_2_objects.png"]
    assert first["picture"] in text
    with Image.open(first["picture"]) as picture:
        assert picture.width / picture.height == pytest.approx(80 / 64)
    assert first["objects"]
    assert {"class", "score", "box", "mask_pixels"} == set(first["objects"][0])
    none = json.loads(vtok(*given, "1", "--json")[1])["predictions"][0]
    assert none["objects"] == []
    assert "no object above the score threshold" in vtok(*given, "1")[1]
    code, _, err = vtok(*given, "1.5")
    assert (code, err) == (2, "error: score=1.5 is not between 0 and 1\n")


def test_predict_saves_a_row_for_each_object(vtok: Vtok, run: str, root: Path, tmp_path: Path) -> None:
    given = ("predict", root / "data/val2017", "--checkpoint", run, "--device", "cpu", "--score", "0.05")
    documents = json.loads(vtok(*given, "--json", "--out", tmp_path / "drawn")[1])["predictions"]
    assert vtok(*given, "--out", tmp_path / "r.csv")[:2] == (0, f"4 images saved as {tmp_path / 'r.csv'}\n")
    header, *rows = list(csv.reader((tmp_path / "r.csv").open()))
    assert header == ["image", "label", "score", "x1", "y1", "x2", "y2", "mask_pixels", "error"]
    expected = [
        (d["image"], o["class"], *o["box"], o["mask_pixels"]) for d in documents for o in d["objects"]
    ]
    assert [(r[0], r[1], *map(float, r[3:7]), int(r[7])) for r in rows if r[1]] == expected
    assert vtok(*given[:-1], "1", "--out", tmp_path / "none.csv")[0] == 0
    _, *rows = list(csv.reader((tmp_path / "none.csv").open()))
    assert rows == [[d["image"], *[""] * 8] for d in documents], "images without objects are in the table"


def test_picture_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Also with names that are not UTF-8 or have several lines."""
    name = os.fsdecode(b"caf\xe9")
    boxes = torch.tensor([[1.0, 2.0, 20.0, 30.0], [5.0, 5.0, 9.0, 9.0]])
    found = ImageDetections(truth(boxes, torch.tensor([0, 1]), None), [name, "two\nlines"])
    assert [line.split("  at ")[0].split()[1] for line in found.text().splitlines()] == [
        r"caf\xe9",
        r"two\x0alines",
    ]
    image = Image.new("RGB", (40, 40))
    picture = found.save(image, tmp_path, name)["picture"]
    assert os.fsencode(picture.name) == b"caf\xe9_objects.png"
    before = picture.read_bytes()
    with files_limited_to(100), pytest.raises(OSError, match="File too large"):
        found.save(image, tmp_path, name)
    assert picture.read_bytes() == before
    assert list(tmp_path.iterdir()) == [picture]


@pytest.mark.parametrize(
    ("write", "model", "options", "classes"),
    [
        (write_yolo, "faster_rcnn", (), CLASSES),
        (partial(write_yolo, polygons=True), "mask_rcnn", (), CLASSES),
        (write_voc, "faster_rcnn", (), CLASSES[:2]),
        (write_pennfudan, "mask_rcnn", ("--val_share", "0.2"), ["pedestrian"]),
        (write_pennfudan, "faster_rcnn", ("--val_share", "0.2", "--data_args.classes", "man"), ["man"]),
    ],
    ids=["yolo", "yolo polygons", "voc", "penn-fudan", "penn-fudan boxes"],
)
def test_other_layouts_are_trained_on_as_they_are(
    vtok: Vtok,
    tmp_path: Path,
    write: Callable[[Path], str],
    model: str,
    options: tuple[str, ...],
    classes: list[str],
) -> None:
    data = write(tmp_path / "data")
    out = tmp_path / "run"
    given = ("--data", data, *options)
    code, _, err = vtok(
        "train", "--task", "detect", "--model", model, *SMALL, *given, "--epochs", "1", "--out", out
    )
    assert code == 0, err
    code, text, err = vtok("eval", "--checkpoint", out, *given, "--device", "cpu", "--json")
    assert (code, err) == (0, "")
    document = json.loads(text)
    assert (document["classes"], document["images"]) == (classes, 4)
    assert (document["masks"] is None) == (model == "faster_rcnn")
    photo = next((tmp_path / "data").rglob("1.png"), None) or tmp_path / "data/JPEGImages/val_1.png"
    given = (photo, "--checkpoint", out, "--out", tmp_path / "pictures", "--score", "0", "--device", "cpu")
    code, text, err = vtok("predict", *given, "--json")
    assert (code, err) == (0, "")
    objects = json.loads(text)["predictions"][0]["objects"]
    assert {each["class"] for each in objects} <= set(classes)
    assert all(("mask_pixels" in each) == (model == "mask_rcnn") for each in objects)


@pytest.mark.parametrize("write", [write_yolo, write_voc])
def test_data_without_masks_ask_for_a_detector_of_boxes(
    vtok: Vtok, tmp_path: Path, write: Callable[[Path], str]
) -> None:
    data = write(tmp_path / "data")
    given = ("--data", data, "--out", tmp_path / "run")
    code, _, err = vtok("train", "--task", "detect", "--model", "mask_rcnn", *SMALL, *given)
    assert code == 2
    assert "train a detector of boxes (--model faster_rcnn)" in err


def test_card_of_a_detector(vtok: Vtok, run: str, data: str, tmp_path: Path) -> None:
    image = next(Path(data.partition(":")[2]).rglob("*.png"))
    code, _, err = vtok(
        "push", "me/squares", "--checkpoint", run, "--out", tmp_path / "new", "--examples", image
    )
    assert (code, err) == (0, "")
    text = (tmp_path / "new/README.md").read_text("utf-8")
    header = ModelCard(text).data.to_dict()
    assert (header["library_name"], header["pipeline_tag"]) == ("visualtokens", "object-detection")
    assert "| box AP | " in text
    assert (tmp_path / "new/example_1.png").is_file()
