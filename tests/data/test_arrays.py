"""Images in memory: .npz files and scikit-learn's digits."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from visualtokens.data.arrays import KEYS, Digits, NpzImages
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


def arrays(**changes: object) -> dict[str, object]:
    return {"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES[:2], "y_test": LABELS[:2]} | changes


def test_items(file: Path) -> None:
    save(file, **arrays(classes=np.array(["a", "b", "c"])))
    train, val = NpzImages(file, "train"), NpzImages(file, "val")
    assert (len(train), len(val), train.classes) == (4, 2, ["a", "b", "c"])
    image, label = train[3]
    np.testing.assert_array_equal(np.asarray(image), IMAGES[3])
    assert (image.mode, image.size, label) == ("RGB", (5, 6), 2)
    assert train.path(3) == f"{file}:x_train[3]"
    assert train.spec == f"npz:{file}"


@pytest.mark.parametrize(("images", "labels"), [pair for pairs in KEYS.values() for pair in pairs])
def test_every_pair_of_names(file: Path, images: str, labels: str) -> None:
    split = "train" if "train" in images else "val"
    given = {images: IMAGES, labels: LABELS}
    if split == "val":
        given |= {"x_train": IMAGES[:1], "y_train": np.array([2])}
    save(file, **given)
    assert len(NpzImages(file, split)) == 4


def test_validation_images_are_preferred_to_test_images(file: Path) -> None:
    save(file, **arrays(x_val=IMAGES[:1], y_val=LABELS[:1]))
    assert len(NpzImages(file, "val")) == 1


def test_channels_first_and_grey_images(file: Path) -> None:
    save(file, **arrays(x_train=IMAGES.transpose(0, 3, 1, 2)))
    np.testing.assert_array_equal(np.asarray(NpzImages(file, "train")[1][0]), IMAGES[1])
    save(file, **arrays(x_train=IMAGES[..., 0]))
    grey = np.asarray(NpzImages(file, "train")[1][0])
    np.testing.assert_array_equal(grey, np.repeat(IMAGES[1, ..., :1], 3, 2))


def test_classes_come_from_the_training_labels(file: Path) -> None:
    save(file, **arrays())
    assert NpzImages(file, "val").classes == ["0", "1", "2"]
    save(file, **arrays(y_test=np.array([0, 3])))
    with pytest.raises(UserError, match="y_test holds labels from 0 to 3; expected 0 to 2"):
        NpzImages(file, "val")


def test_column_of_labels(file: Path) -> None:
    save(file, **arrays(y_train=LABELS[:, None].astype(np.int64)))
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
        (
            {"y_train": np.array([0, 2_000_000_000, 1, 2])},
            "the label 2000000000; give numbers below 100,000",
        ),
        ({"y_train": np.array([0, 2**64 - 1, 1, 2], np.uint64)}, "has the label 18446744073709551615"),
        ({"classes": np.zeros(100_001, np.uint8)}, "has 100,001 classes; give from 1 to 100,000"),
        ({"classes": np.array([], np.str_)}, "has 0 classes"),
        ({"classes": np.array(["a", "b"])}, "labels from 0 to 2; expected 0 to 1"),
        ({"classes": np.array([["a", "b"]])}, r"classes has the shape \(1, 2\)"),
        ({"classes": np.array(["a", None, "c"], object)}, "classes cannot be read .*store plain numbers"),
    ],
)
def test_invalid_arrays_are_rejected(file: Path, changes: dict[str, object], message: str) -> None:
    save(file, **arrays(**changes))
    with pytest.raises(UserError, match=message) as caught:
        NpzImages(file, "train")
    assert "\n" not in str(caught.value)


def test_pickles_are_never_loaded(file: Path) -> None:
    ran = file.parent / "ran"

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (ran,)  # type: ignore[return-value]

    save(file, **arrays(x_train=np.array([Payload()], object)))
    with pytest.raises(UserError, match="cannot be read"):
        NpzImages(file, "train")
    assert not ran.exists()


def test_other_files_are_rejected(file: Path) -> None:
    with pytest.raises(UserError, match="is not a file"):
        NpzImages(file, "train")
    file.write_text("words")
    with pytest.raises(UserError, match=r"is not an \.npz file"):
        NpzImages(file, "train")
    with file.open("wb") as out:
        np.save(out, IMAGES)
    with pytest.raises(UserError, match="is a single array"):
        NpzImages(file, "train")


def test_a_damaged_file_is_rejected(file: Path) -> None:
    np.savez_compressed(file, **arrays())
    intact = file.read_bytes()
    file.write_bytes(intact[: len(intact) // 2])
    with pytest.raises(UserError, match=r"is not an \.npz file"):
        NpzImages(file, "train")
    broken = bytearray(intact)
    broken[100:140] = bytes(40)  # inside the first compressed array
    file.write_bytes(broken)
    with pytest.raises(UserError, match=r"x_train is damaged|x_train cannot be read"):
        NpzImages(file, "train")


def header(shape: tuple[int, ...], dtype: str = "|u1") -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": dtype, "fortran_order": False, "shape": shape})
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            header((10**6, 1000, 1000, 3)),
            r"is uint8 \(1000000, 1000, 1000, 3\) by its header, but holds 0 bytes",
        ),
        (header((10**30,)), "by its header, but holds 0 bytes"),
        (header((4, 6, 5, 3)) + bytes(361), "but holds 361 bytes"),
        (b"no array at all", "x_train cannot be read"),
        (b"\x93NUMPY\x03\x00", "x_train cannot be read"),
    ],
)
def test_the_header_of_an_array_is_checked_against_its_size(file: Path, content: bytes, message: str) -> None:
    save(file, y_train=LABELS)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("x_train.npy", content)
    with pytest.raises(UserError, match=message):
        NpzImages(file, "train")


def test_an_array_may_not_expand_to_more_memory_than_its_file_suggests(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed(file, x_train=np.zeros((1000, 32, 32, 3), np.uint8), y_train=np.zeros(1000, np.uint8))
    assert len(NpzImages(file, "train")) == 1000
    monkeypatch.setattr("visualtokens.data.arrays.SMALL_ARRAY_BYTES", 2**20, raising=False)
    with pytest.raises(UserError, match=r"x_train unpacks from .* to 3,072,128 bytes; at most 1,048,576"):
        NpzImages(file, "train")
    np.savez(file, x_train=np.zeros((1000, 32, 32, 3), np.uint8), y_train=np.zeros(1000, np.uint8))
    assert len(NpzImages(file, "train")) == 1000  # not compressed


def test_an_encrypted_array_is_rejected(file: Path) -> None:
    save(file, **arrays())
    content = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        start = archive.getinfo("x_train.npy").header_offset
    content[start + 6] |= 1  # the flag in the header of the entry, and in the directory
    content[content.index(b"PK\x01\x02") + 8] |= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="x_train is damaged"):
        NpzImages(file, "train")


def test_the_digit_splits_are_disjoint_stratified_and_fixed() -> None:
    train, val = Digits("train"), Digits("val")
    assert (len(train), len(val)) == (1437, 360)
    assert len({d.path(i) for d in (train, val) for i in range(len(d))}) == 1797
    np.testing.assert_allclose(np.bincount(val.labels), np.bincount(load_digits().target) * 0.2, atol=1)
    assert val.rows[:8].tolist() == [21, 24, 28, 34, 35, 37, 39, 42]


def test_digits_are_scikit_learns_images_in_full_range() -> None:
    source, dataset = load_digits(), Digits("val")
    for index in (0, 17, 359):
        image, label = dataset[index]
        row = int(dataset.path(index).removeprefix("digits[").removesuffix("]"))
        expected = np.rint(source.images[row] / 16 * 255)  # 0..16 to 0..255
        assert (image.mode, image.size) == ("RGB", (8, 8))
        np.testing.assert_array_equal(np.asarray(image), np.repeat(expected[..., None], 3, 2))
        assert label == source.target[row]
    assert dataset.classes == list("0123456789")


def test_a_share_of_the_training_images_is_held_out(tmp_path: Path) -> None:
    images, labels = np.arange(20, dtype=np.uint8).reshape(20, 1, 1).repeat(2, 1), np.arange(20) % 2
    file = tmp_path / "x.npz"
    np.savez(file, x_train=images, y_train=labels, x_test=images[:3], y_test=labels[:3])
    train, val, test = (NpzImages(file, split, val_share=0.2) for split in ("train", "val", "test"))  # type: ignore[arg-type]
    assert sorted([*train.images[:, 0, 0], *val.images[:, 0, 0]]) == list(range(20))
    assert (np.bincount(val.labels).tolist(), len(test)) == ([2, 2], 3)
    assert [val.path(i) for i in range(4)] == [f"{file}:x_train[{row}]" for row in val.images[:, 0, 0]]
    np.testing.assert_array_equal(val.labels, val.images[:, 0, 0] % 2)
    np.savez(file, x_train=images, y_train=labels, x_val=images, y_val=labels)
    with pytest.raises(UserError, match=r"holds validation images; leave val_share=0\.2 out"):
        NpzImages(file, "train", val_share=0.2)
    np.savez(file, x_train=images, y_train=labels)
    with pytest.raises(UserError, match=r"no val images: .*; --val_share 0\.2 holds out a fifth"):
        NpzImages(file, "val")


def test_a_file_of_test_images_alone(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x_test=np.zeros((2, 4, 4), np.uint8), y_test=np.array([0, 2]))
    test = NpzImages(tmp_path / "x.npz", "test")
    assert (test.classes, test.labels.tolist()) == (["0", "1", "2"], [0, 2])
    with pytest.raises(UserError, match="has no train images"):
        NpzImages(tmp_path / "x.npz", "train")
