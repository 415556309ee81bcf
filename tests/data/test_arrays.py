from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from visualtokens.data.arrays import KEYS, NpzImages
from visualtokens.errors import UserError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (4, 6, 5, 3), dtype=np.uint8)
LABELS = np.array([2, 0, 1, 2], np.uint8)


def save(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "set.npz"


def whole(**changes: object) -> dict[str, object]:
    return {"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES[:2], "y_test": LABELS[:2]} | changes


def test_items(file: Path) -> None:
    save(file, **whole(classes=np.array(["a", "b", "c"])))
    train, val = NpzImages(file, "train"), NpzImages(file, "val")
    assert (len(train), len(val), train.classes) == (4, 2, ["a", "b", "c"])
    image, label = train[3]
    np.testing.assert_array_equal(np.asarray(image), IMAGES[3])
    assert (image.mode, image.size, label) == ("RGB", (5, 6), 2)
    assert train.path(3) == f"{file}:x_train[3]"
    assert train.spec == f"npz:{file}"


@pytest.mark.parametrize(("images", "labels"), [pair for pairs in KEYS.values() for pair in pairs])
def test_every_documented_spelling(file: Path, images: str, labels: str) -> None:
    split = "train" if "train" in images else "val"
    arrays = {images: IMAGES, labels: LABELS}
    if split == "val":
        arrays |= {"x_train": IMAGES[:1], "y_train": np.array([2])}
    save(file, **arrays)
    assert len(NpzImages(file, split)) == 4


def test_validation_beats_test(file: Path) -> None:
    save(file, **whole(x_val=IMAGES[:1], y_val=LABELS[:1]))
    assert len(NpzImages(file, "val")) == 1


def test_layouts_of_pixels(file: Path) -> None:
    save(file, **whole(x_train=IMAGES.transpose(0, 3, 1, 2)))
    np.testing.assert_array_equal(np.asarray(NpzImages(file, "train")[1][0]), IMAGES[1])
    save(file, **whole(x_train=IMAGES[..., 0]))
    grey = np.asarray(NpzImages(file, "train")[1][0])
    np.testing.assert_array_equal(grey, np.repeat(IMAGES[1, ..., :1], 3, 2))


def test_classes_come_from_the_training_labels(file: Path) -> None:
    save(file, **whole())
    assert NpzImages(file, "val").classes == ["0", "1", "2"]
    save(file, **whole(y_test=np.array([0, 3])))
    with pytest.raises(UserError, match="y_test holds labels from 0 to 3, but there are 3 classes"):
        NpzImages(file, "val")


def test_column_of_labels(file: Path) -> None:
    save(file, **whole(y_train=LABELS[:, None].astype(np.int64)))
    assert [label for _, label in NpzImages(file, "train")] == LABELS.tolist()


def test_missing_keys_are_named(file: Path) -> None:
    save(file, pictures=IMAGES, y_train=LABELS)
    with pytest.raises(UserError, match=r"expected x_train and y_train, or .*; found pictures, y_train"):
        NpzImages(file, "train")
    save(file, x_train=IMAGES, y_train=LABELS)
    with pytest.raises(UserError, match=r"no val images: expected x_val and y_val, or .* x_test and y_test"):
        NpzImages(file, "val")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": IMAGES.astype(np.float32)}, r"x_train is float32 \(4, 6, 5, 3\); expected uint8"),
        ({"x_train": IMAGES[..., :2]}, r"x_train is uint8 \(4, 6, 5, 2\)"),
        ({"x_train": IMAGES[:, :0]}, r"x_train is uint8 \(4, 0, 5, 3\)"),
        ({"x_train": IMAGES[:3]}, "holds 3 images but .*y_train 4 labels"),
        ({"x_train": IMAGES[:0], "y_train": LABELS[:0]}, "holds no images"),
        ({"y_train": LABELS.astype(np.float64)}, r"y_train is float64 \(4,\); expected integers"),
        ({"y_train": np.eye(4, dtype=np.int64)}, r"y_train is int64 \(4, 4\)"),
        ({"y_train": np.array([0, -1, 1, 2])}, "labels from -1 to 2"),
        ({"classes": np.array(["a", "b"])}, "labels from 0 to 2, but there are 2 classes"),
        ({"classes": np.array([["a", "b"]])}, r"classes has the shape \(1, 2\)"),
        ({"classes": np.array(["a", None, "c"], object)}, "classes cannot be read .*store plain numbers"),
    ],
)
def test_unusable_arrays(file: Path, changes: dict[str, object], message: str) -> None:
    save(file, **whole(**changes))
    with pytest.raises(UserError, match=message) as caught:
        NpzImages(file, "train")
    assert "\n" not in str(caught.value)


def test_pickles_are_never_loaded(file: Path) -> None:
    ran = file.parent / "ran"

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (ran,)  # type: ignore[return-value]

    save(file, **whole(x_train=np.array([Payload()], object)))
    with pytest.raises(UserError, match="cannot be read"):
        NpzImages(file, "train")
    assert not ran.exists()


def test_files_that_are_no_npz(file: Path) -> None:
    with pytest.raises(UserError, match="is not a file"):
        NpzImages(file, "train")
    file.write_text("words")
    with pytest.raises(UserError, match=r"is not an \.npz file"):
        NpzImages(file, "train")
    with file.open("wb") as out:
        np.save(out, IMAGES)
    with pytest.raises(UserError, match="is a single array"):
        NpzImages(file, "train")


def test_damaged_npz(file: Path) -> None:
    np.savez_compressed(file, **whole())
    sound = file.read_bytes()
    file.write_bytes(sound[: len(sound) // 2])
    with pytest.raises(UserError, match=r"is not an \.npz file"):
        NpzImages(file, "train")
    broken = bytearray(sound)
    broken[100:140] = bytes(40)  # inside the first compressed array
    file.write_bytes(broken)
    with pytest.raises(UserError, match=r"x_train is damaged|x_train cannot be read"):
        NpzImages(file, "train")


def test_a_real_file() -> None:
    cifar = Path(__file__).parents[2] / "../shared/data/cifar10_20k.npz"
    if not cifar.is_file():
        pytest.skip("no CIFAR-10 beside the project")
    val = NpzImages(cifar, "val")
    assert (len(val), val.classes[val[0][1]], val[0][0].size) == (4000, "horse", (32, 32))
