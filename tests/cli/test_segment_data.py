"""Training, evaluating and predicting on segmentation data as people have them, by the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from visualtokens.data.decode import read_mask
from visualtokens.data.published_classes import CAMVID, CAMVID_COLOURS, CITYSCAPES, VOC, voc_colour
from visualtokens.tasks.segment import palette

Vtok = Callable[..., tuple[int, str, str]]
SPLITS = {"train": 4, "val": 2}
BODY = {
    "backbone": "resnet18",
    "backbone_args": {"channels": [8, 8, 8, 8]},
    "head_args": {"dim": 8, "width": 8},
}


def scenes() -> Iterator[tuple[str, int, NDArray[np.uint8], NDArray[np.uint8]]]:
    """Split, number, photograph and mask (0 left, 1 right, 2 for a border that is not evaluated)."""
    rng = np.random.default_rng(0)
    for split, count in SPLITS.items():
        for i in range(count):
            mask = np.zeros((24, 32), np.uint8)
            mask[:, rng.integers(8, 24) :] = 1
            mask[0] = 2
            photo = np.clip(80 + 100 * mask[..., None] + rng.normal(0, 9, (24, 32, 3)), 0, 255).astype(
                np.uint8
            )
            yield split, i, photo, mask


def save(photo: NDArray[np.uint8], image: Path, mask: Image.Image, file: Path) -> None:
    for path in (image, file):
        path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(photo).save(image)
    mask.save(file)


def camvid(root: Path) -> None:
    numbers = np.array([3, 8, 11], np.uint8)  # road, car, void
    for split, i, photo, mask in scenes():
        save(photo, root / f"{split}/{i}.png", Image.fromarray(numbers[mask]), root / f"{split}annot/{i}.png")


def original_camvid(root: Path) -> None:
    colours = np.array([CAMVID_COLOURS[name] for name in ("LaneMkgsDriv", "Truck_Bus", "Void")], np.uint8)
    listed: dict[str, str] = dict.fromkeys(SPLITS, "")
    for split, i, photo, mask in scenes():
        name = f"{split}_{i}"
        listed[split] += f"{name}.png\n"
        image, file = root / f"701_StillsRaw_full/{name}.png", root / f"LabeledApproved_full/{name}_L.png"
        save(photo, image, Image.fromarray(colours[mask]), file)
    for split, names in listed.items():
        (root / f"{split}.txt").write_text(names)
    lines = [f"{r} {g} {b}\t{name}\n" for name, (r, g, b) in CAMVID_COLOURS.items()]
    (root / "label_colors.txt").write_text("".join(lines))


def cityscapes(root: Path) -> None:
    numbers = np.array([7, 26, 4], np.uint8)  # road, car, static
    for split, i, photo, mask in scenes():
        stem = f"{split}/bonn/bonn_{i:06}_000019"
        file = root / f"gtFine/{stem}_gtFine_labelIds.png"
        save(photo, root / f"leftImg8bit/{stem}_leftImg8bit.png", Image.fromarray(numbers[mask]), file)


def voc(root: Path) -> None:
    base = root / "VOCdevkit/VOC2012"
    numbers = np.array([0, 7, 255], np.uint8)  # background, car, void
    for split, i, photo, mask in scenes():
        drawn = Image.fromarray(numbers[mask])
        drawn.putpalette(np.array([voc_colour(n) for n in range(256)], np.uint8).tobytes())
        save(photo, base / f"JPEGImages/{split}_{i}.jpg", drawn, base / f"SegmentationClass/{split}_{i}.png")
        lists = base / "ImageSets/Segmentation"
        lists.mkdir(parents=True, exist_ok=True)
        with (lists / f"{split}.txt").open("a") as file:
            file.write(f"{split}_{i}\n")


def coloured(root: Path) -> None:
    colours = np.array([(200, 30, 30), (20, 90, 220), (0, 0, 0)], np.uint8)
    for split, i, photo, mask in scenes():
        name = f"{split}{i}"
        save(
            photo,
            root / f"images/{name}.jpg",
            Image.fromarray(colours[mask]),
            root / f"masks/{name}_mask.png",
        )
    (root / "class_dict.csv").write_text("name,r,g,b\nfield,200,30,30\nlake,20,90,220\n")


# The data, their options, the classes, and those that are in the masks.
DATA: dict[str, tuple[Callable[[Path], None], list[str], list[str], list[str]]] = {
    "camvid": (camvid, [], list(CAMVID), ["Road", "Car"]),
    "camvid original": (original_camvid, [], list(CAMVID), ["Road", "Car"]),
    "cityscapes": (cityscapes, [], list(CITYSCAPES), ["road", "car"]),
    "voc": (voc, [], list(VOC), ["background", "car"]),
    "voc mapped": (
        voc,
        ["--data_args.mapping", json.dumps({name: "thing" for name in VOC[1:]})],
        ["background", "thing"],
        ["background", "thing"],
    ),
    "masks in colour": (
        coloured,
        ["--data_args.ignore", "0,0,0", "--data_args.suffix", "_mask", "--val_share", "0.3"],
        ["field", "lake"],
        ["field", "lake"],
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_train_evaluate_predict(vtok: Vtok, tmp_path: Path, name: str) -> None:
    create, given, classes, present = DATA[name]
    root, out = tmp_path / "data", tmp_path / "run"
    create(root)
    spec = f"{name.split()[0]}:{root}"
    model = ("--task", "segment", "--model", "fpn", "--model_args", json.dumps(BODY))
    run = ("--size", "32", "--batch", "4", "--epochs", "1", "--device", "cpu")
    code, _, err = vtok("train", *model, "--data", spec, *given, *run, "--out", out)
    assert (code, "could not be read" in err) == (0, False), err

    code, text, err = vtok("eval", "--checkpoint", out, "--data", spec, *given, "--json")
    assert (code, err) == (0, "")
    document = json.loads(text)
    assert document["classes"] == classes
    assert document["images"] == 2
    pixels = np.sum(document["confusion"], axis=1)
    assert {classes[i] for i in np.flatnonzero(pixels)} == set(present)
    assert pixels.sum() == 2 * 23 * 32  # without the border

    photo = tmp_path / "photo.png"
    Image.fromarray(next(scenes())[2]).save(photo)
    code, text, err = vtok("predict", photo, "--checkpoint", out, "--out", tmp_path / "drawn", "--json")
    assert (code, err) == (0, "")
    (prediction,) = json.loads(text)["predictions"]
    numbers = read_mask(prediction["classes"])
    assert numbers.shape == (24, 32)
    colours = json.loads((out / "config.json").read_text())["label_colors"]
    shown = palette(len(classes), colours)[numbers]
    assert np.array_equal(read_mask(prediction["classes"], colours="rgb"), shown)
    assert len(colours) == len(classes)
