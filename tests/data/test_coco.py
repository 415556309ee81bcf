"""COCO annotation files: objects and masks, and the messages for invalid files."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as reference

from visualtokens.data import BadImage, open_detection
from visualtokens.data.annotations import to_mask, to_run_lengths
from visualtokens.data.coco import CocoObjects
from visualtokens.data.decode import BadAnnotation
from visualtokens.errors import UserError

HEIGHT, WIDTH = 20, 30
TRIANGLE = [2.0, 3.0, 20.5, 4.0, 9.0, 17.25]


def runs(mask: np.ndarray) -> list[int]:
    """Run lengths, column by column, in plain Python."""
    counts, value = [0], 0
    for pixel in mask.T.reshape(-1).tolist():
        if pixel != value:
            counts.append(0)
            value = pixel
        counts[-1] += 1
    return counts


def a_mask() -> np.ndarray:
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[4:9, 10:25] = mask[12:, 3] = 1
    return mask


def document() -> dict[str, Any]:
    """Two images: one with a polygon, a crowd as run lengths and compressed ones; one without objects."""
    compressed = reference.encode(np.asfortranarray(a_mask()))["counts"].decode()
    size = [HEIGHT, WIDTH]
    return {
        "images": [
            {"id": 17, "file_name": "a.png", "width": WIDTH, "height": HEIGHT},
            {"id": 4, "file_name": "b.png", "width": 8, "height": 6},
        ],
        "categories": [{"id": 30, "name": "cat"}, {"id": 7, "name": "dog"}],
        "annotations": [
            {
                "id": 1,
                "image_id": 17,
                "category_id": 7,
                "bbox": [2, 3, 18.5, 14.25],
                "area": 130.0,
                "iscrowd": 0,
                "segmentation": [TRIANGLE],
            },
            {
                "id": 2,
                "image_id": 17,
                "category_id": 30,
                "bbox": [3, 4, 22, 16],
                "area": 83,
                "iscrowd": 1,
                "segmentation": {"size": size, "counts": runs(a_mask())},
            },
            {
                "id": 3,
                "image_id": 17,
                "category_id": 30,
                "bbox": [3, 4, 22, 16],
                "segmentation": {"size": size, "counts": compressed},
            },
        ],
    }


def write(root: Path, content: Any) -> str:
    (root / "annotations").mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (root / "annotations/instances_train2017.json").write_text(text)
    (root / "train2017").mkdir(exist_ok=True)
    Image.new("RGB", (WIDTH, HEIGHT), "red").save(root / "train2017/a.png")
    Image.new("RGB", (8, 6), "blue").save(root / "train2017/b.png")
    return f"coco:{root}"


def test_objects_match_the_file(tmp_path: Path) -> None:
    dataset = open_detection(write(tmp_path, document()), "train")
    assert (len(dataset), dataset.classes) == (2, ["cat", "dog"])
    image, objects = dataset[0]
    assert image.size == (WIDTH, HEIGHT)
    assert objects.labels.tolist() == [1, 0, 0]
    assert objects.crowd.tolist() == [False, True, False]
    assert objects.boxes.tolist() == [[2, 3, 20.5, 17.25], [3, 4, 25, 20], [3, 4, 25, 20]]
    assert objects.area.tolist() == [130, 83, 22 * 16]  # that of the box where none is given
    assert objects.masks is not None
    polygon = reference.decode(reference.merge(reference.frPyObjects([TRIANGLE], HEIGHT, WIDTH)))
    assert np.array_equal(objects.masks[0].numpy(), polygon == 1)
    for mask in objects.masks[1:]:
        assert np.array_equal(mask.numpy(), a_mask() == 1)


def test_an_image_without_objects_has_empty_tensors(tmp_path: Path) -> None:
    _, objects = CocoObjects(write(tmp_path, document())[5:], "train")[1]
    assert len(objects) == 0
    assert objects.boxes.shape == (0, 4)
    assert objects.masks is not None
    assert objects.masks.shape == (0, 6, 8)


def test_masks_are_optional(tmp_path: Path) -> None:
    content = document()
    for annotation in content["annotations"]:
        del annotation["segmentation"]
    spec = write(tmp_path, content)
    assert open_detection(spec, "train", masks=False)[0][1].masks is None
    with pytest.raises(BadAnnotation, match="segmentation: is missing"):
        open_detection(spec, "train")


def test_boxes_of_zero_area_are_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = document()
    content["annotations"][0]["bbox"] = [2, 3, 0, 14]
    with caplog.at_level(logging.WARNING):
        dataset = open_detection(write(tmp_path, content), "train")
    assert dataset[0][1].labels.tolist() == [0, 0]
    assert "1 box of zero area dropped, the first in image 17" in caplog.text


@pytest.mark.parametrize("folder", ["train", "images"])
def test_other_layouts(tmp_path: Path, folder: str) -> None:
    write(tmp_path, document())
    (tmp_path / "annotations/instances_train2017.json").rename(tmp_path / "annotations/instances_train.json")
    (tmp_path / folder).parent.mkdir(exist_ok=True)
    (tmp_path / "train2017").rename(tmp_path / folder)
    assert CocoObjects(tmp_path, "train").path(1) == str(tmp_path / folder / "b.png")


def test_a_missing_file_is_reported_with_the_paths_tried(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"for val, only for train; looked for annotations/instances_val2017.*--val_share 0.2$",
    ):
        open_detection(write(tmp_path, document()), "val")


def test_layout_of_roboflow(tmp_path: Path) -> None:
    folders = {"train": "train", "val": "valid", "test": "test"}
    for folder in folders.values():
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, document())
        (tmp_path / folder / "annotations/instances_train2017.json").rename(
            tmp_path / folder / "_annotations.coco.json"
        )
        (tmp_path / folder / "train2017/a.png").rename(tmp_path / folder / "a.png")
    for split, folder in folders.items():
        dataset = open_detection(f"coco:{tmp_path}", split)  # type: ignore[arg-type]
        assert dataset.path(0) == str(tmp_path / folder / "a.png")
        assert len(dataset[0][1]) == 3


def many(count: int) -> dict[str, Any]:
    """A document of ``count`` images, each with one object."""
    content = document()
    names = [f"{i:02}.png" for i in range(count)]
    content["images"] = [{"id": i, "file_name": n, "width": 8, "height": 6} for i, n in enumerate(names)]
    box = {"category_id": 7, "bbox": [1, 1, 4, 3]}
    content["annotations"] = [{"id": i, "image_id": i, **box} for i in range(count)]
    return content


@pytest.mark.parametrize("folder", ["images", "data", "."])
def test_one_file_is_divided(tmp_path: Path, folder: str) -> None:
    (tmp_path / "all.json").write_text(json.dumps(many(10)))
    (tmp_path / folder).mkdir(exist_ok=True)
    for i in range(10):
        Image.new("RGB", (8, 6)).save(tmp_path / folder / f"{i:02}.png")
    for spec, options in ((tmp_path, {"annotations": "all.json"}), (tmp_path / "all.json", {})):
        parts = [
            open_detection(f"coco:{spec}", split, masks=False, val_share=0.3, **options)  # type: ignore[arg-type]
            for split in ("train", "val")
        ]
        assert [len(part) for part in parts] == [7, 3]
        names = [{part.path(i) for i in range(len(part))} for part in parts]
        assert len(names[0] | names[1]) == 10
        assert all(len(part[i][1]) == 1 for part in parts for i in range(len(part)))
        with pytest.raises(UserError, match=r"all.json has no validation split; hold out a share"):
            open_detection(f"coco:{spec}", "val", masks=False, **options)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"all.json has no test split"):
            open_detection(f"coco:{spec}", "test", masks=False, **options)  # type: ignore[arg-type]


def test_files_of_other_names(tmp_path: Path) -> None:
    spec = write(tmp_path, document())
    (tmp_path / "annotations/instances_train2017.json").rename(tmp_path / "boxes-train.json")
    (tmp_path / "train2017").rename(tmp_path / "photos")
    given = {"annotations": "boxes-{split}.json", "images": str(tmp_path / "photos")}
    dataset = open_detection(spec, "train", **given)  # type: ignore[arg-type]
    assert dataset.path(0) == str(tmp_path / "photos/a.png")
    with pytest.raises(UserError, match=r"for val, only for train; looked for boxes-val.json; name another"):
        open_detection(spec, "val", **given)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"no folder of images for train; looked for pictures; name another"):
        open_detection(spec, "train", annotations="boxes-train.json", images="pictures")


def test_val_share_divides_the_training_file(tmp_path: Path) -> None:
    spec = write(tmp_path, many(4))
    sizes = [len(open_detection(spec, s, masks=False, val_share=0.5)) for s in ("train", "val")]  # type: ignore[arg-type]
    assert sizes == [2, 2]
    assert open_detection(spec, "val", masks=False, val_share=0.5).path(0).startswith(f"{tmp_path}/train2017")
    (tmp_path / "annotations/instances_val2017.json").write_text("{}")
    with pytest.raises(UserError, match=r"has a validation split, .*instances_val2017.json; leave val_share"):
        open_detection(spec, "train", masks=False, val_share=0.5)


def test_without_strict_an_invalid_annotation_raises_when_its_image_is_read(tmp_path: Path) -> None:
    content = many(3)
    content["annotations"][1]["bbox"] = [1, 2, 3]
    spec = write(tmp_path, content)
    for i in range(3):
        Image.new("RGB", (8, 6)).save(tmp_path / f"train2017/{i:02}.png")
    dataset = open_detection(spec, "train", masks=False, strict=False)
    assert [len(dataset[i][1]) for i in (0, 2)] == [1, 1]
    with pytest.raises(BadAnnotation, match=r"image 1, bbox: \[1, 2, 3\] is not"):
        dataset[1]
    content["annotations"][2]["bbox"] = None
    with pytest.raises(BadAnnotation, match=r"image 1, bbox: .*\(1 more images have invalid annotations"):
        open_detection(write(tmp_path, content), "train", masks=False)


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets ``annotations.0.bbox`` and the like."""

    def apply(content: dict[str, Any]) -> None:
        place: Any = content
        *parents, last = path.split(".")
        for key in parents:
            place = place[int(key) if key.isdigit() else key]
        place[int(last) if last.isdigit() else last] = value

    return apply


INVALID = {
    "bbox of 3": ("annotations.0.bbox", [1, 2, 3], "image 17, bbox: [1, 2, 3] is not"),
    "bbox of text": ("annotations.0.bbox", ["1", 2, 3, 4], "image 17, bbox"),
    "bbox not finite": ("annotations.0.bbox", [float("nan"), 2, 3, 4], "image 17, bbox"),
    "bbox negative": ("annotations.0.bbox", [1, 2, -3, 4], "image 17, bbox"),
    "bbox missing": ("annotations.0.bbox", None, "image 17, bbox: None"),
    "bbox beyond the image": ("annotations.0.bbox", [2, 3, 2e9, 4], "does not lie in the image of 30×20"),
    "bbox beside the image": ("annotations.0.bbox", [31, 3, 4, 4], "does not lie in the image of 30×20"),
    "bbox before the image": ("annotations.0.bbox", [2, -5, 4, 5], "does not lie in the image of 30×20"),
    "bbox of a huge integer": ("annotations.0.bbox", [10**400, 2, 3, 4], "image 17, bbox"),
    "no such image": ("annotations.0.image_id", 99, "image 99, image_id: there is no image 99"),
    "no such class": ("annotations.0.category_id", 8, "image 17, category_id: there is no category 8"),
    "crowd": ("annotations.0.iscrowd", 2, "image 17, iscrowd: 2 is neither"),
    "area beyond the image": ("annotations.0.area", 1e15, "1000000000000000.0 is not a number of pixels of"),
    "area": ("annotations.0.area", -1, "image 17, area: -1"),
    "two points": (
        "annotations.0.segmentation",
        [[1, 2, 3, 4]],
        "image 17, segmentation: [1, 2, 3, 4] is not a",
    ),
    "odd polygon": ("annotations.0.segmentation", [[1, 2, 3, 4, 5, 6, 7]], "image 17, segmentation"),
    "text polygon": (
        "annotations.0.segmentation",
        [[1, 2, 3, 4, 5, "6"]],
        "holds something that is not a number",
    ),
    "polygon beyond the image": ("annotations.0.segmentation", [[0, 0, 2e9, 0, 9, 9]], "of 30×20 pixels"),
    "endless polygon": (
        "annotations.0.segmentation",
        [[0, 0, 30, 20] * 2000],
        "more than 50,000 pixels long",
    ),
    "many polygons": ("annotations.0.segmentation", [TRIANGLE] * 1001, "1,001 polygons are more than 1,000"),
    "text": ("annotations.0.segmentation", "circle", "neither a list of polygons nor run lengths"),
    "run lengths of another size": ("annotations.1.segmentation.size", [9, 9], "its size is [9, 9]"),
    "run lengths of a float size": ("annotations.1.segmentation.size", [20.0, 30.0], "its size is [20.0,"),
    "too few run lengths": ("annotations.1.segmentation.counts", [5, 5], "cover 10 pixels of 600"),
    "negative run length": ("annotations.1.segmentation.counts", [-5, 605], "are not run lengths"),
    "width": ("images.0.width", 0, "image 17, width: 0 is not a number of pixels"),
    "height": ("images.1.height", "6", "image 4, height: '6'"),
    "fractional width": ("images.0.width", 30.0, "image 17, width: 30.0 is not a number of pixels"),
    "huge image": ("images.0.width", 10**7, "10000000×20 is more than 64 megapixels"),
    "absolute name": ("images.1.file_name", "/etc/a.png", "image 4, file_name: '/etc/a.png' lies outside"),
    "name above": ("images.1.file_name", "x/../../a.png", "'x/../../a.png' lies outside the folder"),
    "name of no file": ("images.1.file_name", "\ud800.png", "image 4, file_name"),
    "huge id": ("images.1.id", 2**63, "image number 1, id: 9223372036854775808 is not an integer"),
    "name": ("images.1.file_name", "", "image 4, file_name"),
    "id": ("images.1.id", "x", "image number 1, id: 'x' is not an integer"),
    "same id": ("images.1.id", 17, "image 17, id: two images have the same id"),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_annotation_is_reported_by_file_image_and_field(tmp_path: Path, case: str) -> None:
    path, value, expected = INVALID[case]
    content = copy.deepcopy(document())
    change(path, value)(content)
    with pytest.raises(BadAnnotation) as caught:
        open_detection(write(tmp_path, content), "train")
    message = str(caught.value)
    assert str(tmp_path / "annotations/instances_train2017.json") in message
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ([], "has no list 'images'"),
        ({"images": [], "annotations": []}, "has no list 'categories'"),
        ({"images": [], "annotations": [], "categories": []}, "has 0 classes"),
        ({"images": [], "annotations": [], "categories": [{"id": 1, "name": "a"}]}, "holds no images"),
        (
            {"images": [], "annotations": [], "categories": [{"id": 1}]},
            "needs an integer 'id' and a 'name'",
        ),
        (
            {"images": [], "annotations": [], "categories": [{"id": 1, "name": "a"}, {"id": 2, "name": "a"}]},
            "repeats an 'id' or 'name'",
        ),
        (
            {"images": [], "annotations": [3], "categories": [{"id": 1, "name": "a"}]},
            "annotation 3 is not an",
        ),
    ],
)
def test_other_files_are_rejected(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_detection(write(tmp_path, content), "train")


def test_invalid_compressed_run_lengths_are_reported_on_access(tmp_path: Path) -> None:
    content = document()
    content["annotations"][2]["segmentation"]["counts"] = "zzzz~~~"
    dataset = open_detection(write(tmp_path, content), "train")
    with pytest.raises(BadAnnotation, match=r"image 17, segmentation: .*annotation 3"):
        dataset[0]


def test_objects_may_extend_a_little_beyond_the_image(tmp_path: Path) -> None:
    content = document()
    content["annotations"][0] |= {"bbox": [-2, 3, 40, 30.5], "segmentation": [[-2, 3, 38, 3, 9, 33.5]]}
    objects = open_detection(write(tmp_path, content), "train")[0][1]
    assert objects.boxes[0].tolist() == [-2, 3, 38, 33.5]
    assert objects.masks is not None
    assert objects.masks.shape == (3, HEIGHT, WIDTH)


def test_the_number_of_objects_in_an_image_is_limited(tmp_path: Path) -> None:
    content = document()
    del content["annotations"][0]["segmentation"]
    content["annotations"] = content["annotations"][:1] * 10_001
    with pytest.raises(BadAnnotation, match="image 17, image_id: 10,001 objects, more than 10,000"):
        open_detection(write(tmp_path, content), "train", masks=False)
    content = document()
    content["images"][1] |= {"width": 8000, "height": 8000}
    content["annotations"] = [content["annotations"][0] | {"image_id": 4}] * 40
    spec = write(tmp_path, content)
    with pytest.raises(BadAnnotation, match="image 4, segmentation: 40 masks of 64,000,000 pixels take more"):
        open_detection(spec, "train")
    assert len(open_detection(spec, "train", masks=False)) == 2


def test_images_outside_the_folder_are_opened_on_request(tmp_path: Path) -> None:
    content = document()
    content["images"][0]["file_name"] = "../elsewhere/a.png"
    write(tmp_path, content)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train2017/a.png").rename(tmp_path / "elsewhere/a.png")
    assert CocoObjects(tmp_path, "train", allow_outside=True)[0][0].size == (WIDTH, HEIGHT)
    with pytest.raises(BadAnnotation, match="allow_outside=True"):
        CocoObjects(tmp_path, "train")


def test_compressed_run_lengths_beyond_the_image_are_rejected(tmp_path: Path) -> None:
    content = document()
    large = reference.encode(np.asfortranarray(np.eye(4000, dtype=np.uint8)))["counts"].decode()
    content["annotations"][2]["segmentation"]["counts"] = large
    dataset = open_detection(write(tmp_path, content), "train")
    with pytest.raises(BadAnnotation, match=r"image 17, segmentation: .*annotation 3"):
        dataset[0]


def test_an_image_of_another_size_than_annotated_is_rejected(tmp_path: Path) -> None:
    dataset = open_detection(write(tmp_path, document()), "train")
    Image.new("RGB", (HEIGHT, WIDTH)).save(tmp_path / "train2017/a.png")
    with pytest.raises(BadImage, match=r"is 20×30, but .* has 30×20 in 'width' and 'height' of image 17"):
        dataset[0]


@pytest.mark.parametrize("seed", range(3))
def test_masks_equal_those_of_pycocotools(seed: int) -> None:
    rng = np.random.default_rng(seed)
    height, width = rng.integers(1, 60, 2).tolist()
    polygons = [(rng.uniform(-5, 65, 2 * rng.integers(3, 9))).tolist() for _ in range(rng.integers(1, 4))]
    expected = reference.decode(reference.merge(reference.frPyObjects(polygons, height, width)))
    assert np.array_equal(to_mask(polygons, height, width), expected == 1)
    mask = rng.random((height, width)) < 0.3
    assert to_run_lengths(mask) == reference.encode(np.asfortranarray(mask.astype(np.uint8)))
    assert np.array_equal(to_mask(to_run_lengths(mask), height, width), mask)
    assert np.array_equal(to_mask({"size": [height, width], "counts": runs(mask)}, height, width), mask)
