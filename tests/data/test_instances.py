"""Instance masks: objects, layouts, and the messages for invalid files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.squares import CLASSES, HEIGHT, WIDTH, save, write_pennfudan, write_squares
from visualtokens.data import open_detection
from visualtokens.data.decode import BadAnnotation
from visualtokens.data.instances import InstanceMasks
from visualtokens.errors import UserError


def test_objects_equal_those_of_the_same_data_in_cocos_layout(tmp_path: Path) -> None:
    spec, coco = write_pennfudan(tmp_path / "a", images=6), write_squares(tmp_path / "b", train=6, val=1)
    for masks in (True, False):
        dataset = open_detection(spec, "train", masks=masks)
        reference = open_detection(coco, "train", masks=masks)
        assert (dataset.classes, reference.classes) == (["pedestrian"], CLASSES)
        assert len(dataset) == len(reference)
        for index in range(6):
            (image, objects), (expected_image, expected) = dataset[index], reference[index]
            assert np.array_equal(image, expected_image)
            assert torch.equal(objects.boxes, expected.boxes)
            assert torch.equal(objects.area, expected.area)
            assert objects.labels.tolist() == [0] * len(expected)
            assert (objects.masks is None) == (not masks)
            if objects.masks is not None:
                assert torch.equal(objects.masks, expected.masks)


def write(
    root: Path, mask: np.ndarray, name: str = "a", images: str = "images", masks: str = "masks"
) -> None:
    save(Image.new("RGB", mask.shape[::-1]), root / images / f"{name}.jpg")
    save(Image.fromarray(mask), root / masks / f"{name}.png")


def test_numbers_may_have_gaps_and_16_bits_and_objects_may_be_in_pieces(tmp_path: Path) -> None:
    mask = np.zeros((5, 7), np.uint16)
    mask[1, 2] = mask[4, 6] = 300
    mask[2:4, 0] = 7
    write(tmp_path, mask)
    _, objects = InstanceMasks("instances", tmp_path, "train")[0]
    assert objects.boxes.tolist() == [[0, 2, 1, 4], [2, 1, 7, 5]]
    assert objects.area.tolist() == [2, 2]
    assert objects.masks is not None
    assert np.array_equal(objects.masks.numpy(), [mask == 7, mask == 300])


@pytest.mark.parametrize("value", [0, 1])
def test_masks_without_objects_and_without_background(tmp_path: Path, value: int) -> None:
    write(tmp_path, np.full((4, 6), value, np.uint8))
    _, objects = InstanceMasks("instances", tmp_path, "train")[0]
    assert objects.boxes.tolist() == [[0, 0, 6, 4]] * value
    assert objects.masks is not None
    assert objects.masks.shape == (value, 4, 6)


def test_the_class_can_be_named(tmp_path: Path) -> None:
    write(tmp_path, np.eye(4, dtype=np.uint8))
    spec = f"instances:{tmp_path}"
    assert open_detection(spec, "train").classes == ["object"]
    for classes in ("cell", ["cell"]):
        assert open_detection(spec, "train", classes=classes).classes == ["cell"]
    with pytest.raises(UserError, match=r"\['a', 'b'\]: the objects of instances are of one class; give one"):
        open_detection(spec, "train", classes=["a", "b"])


def test_splits(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        write(tmp_path, np.eye(4, dtype=np.uint8), f"{split}/{split}")
    spec = f"instances:{tmp_path}"
    for split in ("train", "val", "test"):
        dataset = open_detection(spec, split)  # type: ignore[arg-type]
        assert [Path(dataset.path(i)).stem for i in range(len(dataset))] == [split]
    with pytest.raises(UserError, match=r"has a validation split, .*images/val; leave val_share out"):
        open_detection(spec, "train", val_share=0.5)


def test_val_share(tmp_path: Path) -> None:
    spec = write_pennfudan(tmp_path, images=10)
    parts = [open_detection(spec, split, val_share=0.2) for split in ("train", "val")]  # type: ignore[arg-type]
    names = [{part.path(i) for i in range(len(part))} for part in parts]
    assert [len(each) for each in names] == [8, 2]
    assert len(names[0] | names[1]) == 10
    with pytest.raises(UserError, match=r"has no validation split; hold out a share: --val_share 0.2"):
        open_detection(spec, "val")
    with pytest.raises(UserError, match="has no test split"):
        open_detection(spec, "test")


def test_invalid_files_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_detection(write_pennfudan(tmp_path, images=3), "train")
    mask = tmp_path / "PedMasks/1_mask.png"
    save(Image.new("L", (9, 9)), mask)
    with pytest.raises(BadAnnotation, match=r"1_mask.png: annotation of image 1, size: 9×9, but .* is 80×64"):
        dataset[1]
    save(Image.new("RGB", (WIDTH, HEIGHT), "red"), mask)
    with pytest.raises(BadAnnotation, match="image 1, mode: RGB holds colours"):
        dataset[1]
    mask.write_bytes(b"no image")
    with pytest.raises(BadAnnotation, match="image 1, file: not an image"):
        dataset[1]
    monkeypatch.setattr("visualtokens.data.annotations.MAX_OBJECTS", 1)
    with pytest.raises(BadAnnotation, match="image 2, pixels: 2 objects, more than 1"):
        dataset[2]
    mask.unlink()
    with pytest.raises(UserError, match=r"1 of 3 images in .*PNGImages have no mask in .*; add .*1_mask.png"):
        open_detection(f"pennfudan:{tmp_path}", "train")
    with pytest.raises(UserError, match="has no folder images; expected images and masks"):
        open_detection(f"instances:{tmp_path}", "train")
