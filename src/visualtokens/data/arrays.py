"""Images held in memory: ``.npz`` files, and the digits that scikit-learn includes."""

from __future__ import annotations

import lzma
import math
import zipfile
import zlib
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visualtokens.data.base import (
    MAX_CLASSES,
    ImageDataset,
    Split,
    check_class_count,
    check_split,
    split_rows,
)
from visualtokens.errors import UserError
from visualtokens.files import one_line

# Array names in use, in order of preference; validation images are preferred to test images.
VAL_KEYS = (("x_val", "y_val"), ("val_images", "val_labels"))
TEST_KEYS = (("x_test", "y_test"), ("test_images", "test_labels"))
KEYS = {
    "train": (("x_train", "y_train"), ("train_images", "train_labels")),
    "val": (*VAL_KEYS, *TEST_KEYS),
    "test": TEST_KEYS,
}

# An array is at most 16 GiB and, above 1 GiB, at most 100 times its size in the file.
SMALL_ARRAY_BYTES = 2**30
MAX_ARRAY_BYTES = 2**34
MAX_EXPANSION = 100

# Raised by zipfile; RuntimeError for encrypted arrays and for features it lacks.
DAMAGE = (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)


class NpzImages(ImageDataset):
    """Images and labels in arrays with one of the name pairs :data:`KEYS`, and optional ``classes``.

    Images are uint8 of shape (n, H, W, 3), (n, 3, H, W) or, in grey, (n, H, W); labels are integers of shape
    (n,) or (n, 1), less than 100,000. Without ``classes``, the class names are the numbers up to the largest
    label, of the training images if there are any. Without validation images, ``val_share`` holds out a share
    of the training images. Arrays of Python objects are refused, and an array's size is checked before it is
    read: see :data:`MAX_ARRAY_BYTES`.
    """

    def __init__(self, path: str | Path, split: Split, *, val_share: float | None = None) -> None:
        check_split(split)
        self.spec = f"npz:{path}"
        file = Path(path).expanduser()
        share = None if split == "test" else val_share
        with _open(file) as arrays:
            if share is not None and any(images in arrays.files for images, _ in VAL_KEYS):
                raise UserError(f"{file} holds validation images; leave val_share={share} out")
            image_key, label_key = _keys(arrays, split if share is None else "train", file)
            _, train_key = _find(arrays, "train") or (image_key, label_key)
            self.classes = _classes(arrays, _labels(arrays, train_key, file), file)
            self.images = _channels_last(_read(arrays, image_key, file), f"{file}:{image_key}")
            self.labels = _labels(arrays, label_key, file)
        self._name = f"{file}:{image_key}"
        self._check(f"{file}:{label_key}")
        self.rows = np.arange(len(self.images))  # (n,): rows of the arrays
        if share is not None:
            names, labels = list(map(str, self.rows)), self.labels.tolist()
            self.rows = np.array(split_rows(split, names, share, labels=labels, source=self.spec))
            self.images, self.labels = self.images[self.rows], self.labels[self.rows]

    def _check(self, label_name: str) -> None:
        if len(self.images) != len(self.labels):
            raise UserError(
                f"{self._name} holds {len(self.images)} images but {label_name} {len(self.labels)} labels"
            )
        if len(self.images) == 0:
            raise UserError(f"{self._name} holds no images")
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= len(self.classes):
            raise UserError(
                f"{label_name} holds labels from {low} to {high}; expected 0 to {len(self.classes) - 1}"
            )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]).convert("RGB"), int(self.labels[index])

    def path(self, index: int) -> str:
        return f"{self._name}[{self.rows[index]}]"


def _open(file: Path) -> np.lib.npyio.NpzFile:
    if not file.is_file():
        raise UserError(f"{file} is not a file; give the path of an .npz file")
    try:
        arrays = np.load(file, allow_pickle=False)
    except (ValueError, *DAMAGE) as error:
        raise UserError(f"{file} is not an .npz file ({error}); make one with numpy.savez") from error
    if not isinstance(arrays, np.lib.npyio.NpzFile):
        raise UserError(f"{file} is a single array, not an .npz file; make one with numpy.savez")
    return arrays


def _find(arrays: np.lib.npyio.NpzFile, split: Split) -> tuple[str, str] | None:
    pairs = (pair for pair in KEYS[split] if set(pair) <= set(arrays.files))
    return next(pairs, None)


def _keys(arrays: np.lib.npyio.NpzFile, split: Split, file: Path) -> tuple[str, str]:
    if found := _find(arrays, split):
        return found
    expected = ", or ".join(f"{images} and {labels}" for images, labels in KEYS[split])
    raise UserError(
        f"{file} has no {split} images: expected {expected}; found {', '.join(arrays.files) or 'nothing'}"
        + ("; --val_share 0.2 holds out a fifth of the training images" if split == "val" else "")
    )


def _read(arrays: np.lib.npyio.NpzFile, key: str, file: Path) -> NDArray[np.generic]:
    try:
        _check_size(arrays, key, file)
        return arrays[key]
    except UserError:
        raise
    except ValueError as error:  # raised by NumPy for pickled objects
        raise UserError(
            f"{file}:{key} cannot be read ({one_line(error)}); store plain numbers or strings"
        ) from error
    except DAMAGE as error:
        raise UserError(f"{file}:{key} is damaged ({one_line(error)}); make the file again") from error


def _check_size(arrays: np.lib.npyio.NpzFile, key: str, file: Path) -> None:
    """Raise if an array is too large, or if its header describes another size than the archive."""
    archive = arrays.zip
    assert archive is not None  # it is open
    entry = archive.getinfo(key if key in archive.namelist() else f"{key}.npy")  # as NumPy looks it up
    stored = min(entry.compress_size, file.stat().st_size)
    limit = max(SMALL_ARRAY_BYTES, min(MAX_ARRAY_BYTES, MAX_EXPANSION * stored))
    if entry.file_size > limit:
        raise UserError(
            f"{file}:{key} unpacks from {stored:,} to {entry.file_size:,} bytes; at most {limit:,} are read"
        )
    with archive.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"format {version[0]}.{version[1]} is for records")
        first = version == (1, 0)
        read_header = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(stream)
        content = entry.file_size - stream.tell()
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize != content:
        raise UserError(
            f"{file}:{key} is {dtype} {shape} by its header, but holds {content:,} bytes; make the file again"
        )


def _labels(arrays: np.lib.npyio.NpzFile, key: str, file: Path) -> NDArray[np.int64]:
    labels = _read(arrays, key, file)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{file}:{key} is {labels.dtype} {labels.shape}; expected integers of shape (n,)")
    if labels.max(initial=0) >= MAX_CLASSES:
        raise UserError(f"{file}:{key} has the label {labels.max()}; give numbers below {MAX_CLASSES:,}")
    return labels.astype(np.int64)


def _classes(arrays: np.lib.npyio.NpzFile, labels: NDArray[np.int64], file: Path) -> list[str]:
    if "classes" not in arrays.files:
        return [str(number) for number in range(int(labels.max(initial=-1)) + 1)]
    names = _read(arrays, "classes", file)
    if names.ndim != 1:
        raise UserError(f"{file}:classes has the shape {names.shape}; expected one name per class")
    check_class_count(len(names), f"{file}:classes")
    return [str(name) for name in names]


def _channels_last(images: NDArray[np.generic], name: str) -> NDArray[np.uint8]:
    """Images as ``(n, H, W)`` or ``(n, H, W, 3)``; if axes 1 and 3 are both 3, axis 3 holds the channels."""
    grey = images.ndim == 3
    last = images.ndim == 4 and images.shape[3] == 3
    first = images.ndim == 4 and images.shape[1] == 3
    if images.dtype != np.uint8 or not (grey or last or first) or 0 in images.shape[1:]:
        raise UserError(
            f"{name} is {images.dtype} {images.shape}; expected uint8 (n, H, W, 3), (n, 3, H, W) or (n, H, W)"
        )
    pixels = images.astype(np.uint8, copy=False)
    return pixels if grey or last else np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))


class Digits(ImageDataset):
    """scikit-learn's 1,797 handwritten digits, 8×8, light on black: 1,437 for training, 360 for validation.

    The split is stratified and fixed; it does not depend on the seed of a training run.
    """

    def __init__(self, split: Split) -> None:
        check_split(split, source="digits", has=("train", "val"))
        images, labels = _load_digits()
        self.spec = "digits"
        self.classes = [str(digit) for digit in range(10)]
        self.rows = _digit_rows(split)  # (n,): rows of scikit-learn's dataset
        self.images = images[self.rows]  # (n, 8, 8) uint8
        self.labels = labels[self.rows]  # (n,)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]).convert("RGB"), int(self.labels[index])

    def path(self, index: int) -> str:
        """The row of scikit-learn's dataset, such as ``digits[17]``, so that the splits share no name."""
        return f"digits[{self.rows[index]}]"


@cache
def _load_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), from 0..16
    return images, bunch.target.astype(np.int64)


@cache
def _digit_rows(split: Split) -> NDArray[np.int64]:
    from sklearn.model_selection import train_test_split

    _, labels = _load_digits()
    train, val = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    return np.sort(train if split == "train" else val)
