"""The contact sheet of a dataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.squares import HEIGHT, WIDTH, save, write_pennfudan, write_squares
from visualtokens.data import open_splits
from visualtokens.tasks import contact_sheet as module
from visualtokens.tasks.contact_sheet import COLUMNS, MARGIN, TILE, TRAIN_ROWS, contact_sheet
from visualtokens.tasks.detect.detections import object_colours
from visualtokens.tasks.segment.pictures import palette


def shows(sheet: Image.Image, colour: tuple[int, ...]) -> int:
    """The number of pixels of this colour."""
    return int((np.asarray(sheet) == colour).all(2).sum())


def test_classification_shows_images_of_all_classes_and_splits(tmp_path: Path) -> None:
    colours = {"red": (255, 0, 0), "lime": (0, 255, 0)}
    for split in ("train", "val"):
        for name in colours:
            for i in range(8):
                save(Image.new("RGB", (12, 6), name), tmp_path / f"{split}/{name}/{i}.png")
    (tmp_path / "train/red/0.png").write_bytes(b"no image")
    sheet = contact_sheet(open_splits(f"folder:{tmp_path}"))
    assert sheet.width == COLUMNS * (TILE + MARGIN) + MARGIN
    tile = TILE * TILE // 2
    # 15 of 16 training images can be read, 8 of them lime; of 5 validation images 2 or 3 are.
    assert shows(sheet, colours["red"]) in (9 * tile, 10 * tile)
    assert shows(sheet, colours["red"]) + shows(sheet, colours["lime"]) == 20 * tile


def test_objects_are_drawn_in_the_tile(tmp_path: Path) -> None:
    splits = open_splits(write_pennfudan(tmp_path))
    sheet = np.asarray(contact_sheet(splits))
    first, second = object_colours([0, 0])
    assert (sheet == first).all(2).sum() > 1000
    assert (sheet == second).all(2).sum() > 1000
    # The box of the second training image, scaled to its tile, is where the outline is drawn.
    _, objects = splits.datasets["train"][1]
    left, top, right, bottom = (objects.boxes[0] * TILE / WIDTH).round().int().tolist()
    tile = sheet[:, MARGIN + (TILE + MARGIN) : MARGIN + 2 * TILE + MARGIN]
    rows, columns = np.nonzero((tile[: MARGIN + 60 + round(TILE * HEIGHT / WIDTH)] == first).all(2))
    assert abs(columns.min() - left) <= 1
    assert abs(columns.max() - right) <= 1
    assert bottom - top <= np.ptp(rows) <= bottom - top + 25  # with the label above


def test_excluded_objects_have_a_label_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    def record(image: Image.Image, objects: object, classes: list[str], **options: object) -> Image.Image:
        texts.extend(classes[label] for label in objects.labels.tolist())  # type: ignore[attr-defined]
        return image

    spec = write_squares(tmp_path, train=2, val=1)
    file = tmp_path / "annotations/instances_train2017.json"
    file.write_text(file.read_text().replace('"iscrowd": 0', '"iscrowd": 1', 1))
    monkeypatch.setattr(module, "draw", record)
    contact_sheet(open_splits(spec))
    assert [text.endswith(" (excluded)") for text in texts] == [True, False]


def test_segmentation_has_a_legend_of_the_classes_shown(tmp_path: Path) -> None:
    for split in ("train", "val"):
        save(Image.new("RGB", (40, 20), "white"), tmp_path / f"images/{split}/a.png")
        save(Image.fromarray(np.ones((20, 40), np.uint8)), tmp_path / f"masks/{split}/a.png")
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    sheet = contact_sheet(open_splits(f"masks:{tmp_path}"))
    counts = [shows(sheet, tuple(colour)) for colour in palette(3).tolist()]
    assert counts[1] > 100
    assert (counts[0], counts[2]) == (0, 0)


def test_segmentation_uses_the_colours_of_the_dataset(tmp_path: Path) -> None:
    for split in ("train", "val"):
        save(Image.new("RGB", (40, 20), "white"), tmp_path / f"images/{split}/a.png")
        save(Image.new("RGB", (40, 20), (0, 200, 100)), tmp_path / f"masks/{split}/a.png")
    colors = {"a": [250, 0, 0], "b": [0, 200, 100]}
    sheet = contact_sheet(open_splits(f"masks:{tmp_path}", colors=colors))
    assert shows(sheet, (0, 200, 100)) > 100
    assert shows(sheet, (250, 0, 0)) == 0


def test_a_dataset_of_many_images_fills_the_grid() -> None:
    sheet = contact_sheet(open_splits("digits"))
    rows = TRAIN_ROWS + 1
    assert rows * TILE < sheet.height < rows * (TILE + 100)
