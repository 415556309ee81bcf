"""Images in one ``.npz`` file of uint8 arrays."""

from __future__ import annotations

import zipfile
import zlib
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visualtokens.data.base import ImageDataset, Split, check_split
from visualtokens.errors import UserError

# The spellings in use, the preferred one first; a validation split beats a test split.
KEYS = {
    "train": (("x_train", "y_train"), ("train_images", "train_labels")),
    "val": (
        ("x_val", "y_val"),
        ("val_images", "val_labels"),
        ("x_test", "y_test"),
        ("test_images", "test_labels"),
    ),
}


class NpzImages(ImageDataset):
    """Arrays of images and labels under one of the :data:`KEYS`, and class names under ``classes``.

    Images are uint8 of shape (N, H, W, 3), (N, 3, H, W) or, in grey, (N, H, W); labels are integers of
    shape (N,) or (N, 1). Without ``classes`` the classes are the numbers up to the largest training label.
    """

    def __init__(self, path: str | Path, split: Split) -> None:
        check_split(split)
        self.spec = f"npz:{path}"
        file = Path(path).expanduser()
        with _open(file) as arrays:
            image_key, label_key = _keys(arrays, split, file)
            _, train_key = _keys(arrays, "train", file)
            self.classes = _classes(arrays, _labels(arrays, train_key, file), file)
            self.images = _channels_last(_read(arrays, image_key, file), f"{file}:{image_key}")
            self.labels = _labels(arrays, label_key, file)
        self._name = f"{file}:{image_key}"
        self._check(f"{file}:{label_key}")

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
                f"{label_name} holds labels from {low} to {high}, "
                f"but there are {len(self.classes)} classes: expected 0 to {len(self.classes) - 1}"
            )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]).convert("RGB"), int(self.labels[index])

    def path(self, index: int) -> str:
        return f"{self._name}[{index}]"


def _open(file: Path) -> np.lib.npyio.NpzFile:
    if not file.is_file():
        raise UserError(f"{file} is not a file; give the path of an .npz file")
    try:
        arrays = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{file} is not an .npz file ({error}); make one with numpy.savez") from error
    if not isinstance(arrays, np.lib.npyio.NpzFile):
        raise UserError(f"{file} is a single array, not an .npz file; make one with numpy.savez")
    return arrays


def _keys(arrays: np.lib.npyio.NpzFile, split: Split, file: Path) -> tuple[str, str]:
    for images, labels in KEYS[split]:
        if images in arrays.files and labels in arrays.files:
            return images, labels
    expected = ", or ".join(f"{images} and {labels}" for images, labels in KEYS[split])
    raise UserError(
        f"{file} has no {split} images: expected {expected}; found {', '.join(arrays.files) or 'nothing'}"
    )


def _read(arrays: np.lib.npyio.NpzFile, key: str, file: Path) -> NDArray[np.generic]:
    try:
        return arrays[key]
    except ValueError as error:  # how NumPy refuses to unpickle
        raise UserError(f"{file}:{key} cannot be read ({error}); store plain numbers or strings") from error
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{file}:{key} is damaged ({error}); make the file again") from error


def _labels(arrays: np.lib.npyio.NpzFile, key: str, file: Path) -> NDArray[np.int64]:
    labels = _read(arrays, key, file)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{file}:{key} is {labels.dtype} {labels.shape}; expected integers of shape (N,)")
    return labels.astype(np.int64)


def _classes(arrays: np.lib.npyio.NpzFile, labels: NDArray[np.int64], file: Path) -> list[str]:
    if "classes" not in arrays.files:
        return [str(number) for number in range(int(labels.max(initial=-1)) + 1)]
    names = _read(arrays, "classes", file)
    if names.ndim != 1:
        raise UserError(f"{file}:classes has the shape {names.shape}; expected one name per class")
    return [str(name) for name in names]


def _channels_last(images: NDArray[np.generic], name: str) -> NDArray[np.uint8]:
    """(N, H, W) or (N, H, W, 3); three channels in last place win where both readings are possible."""
    grey = images.ndim == 3
    last = images.ndim == 4 and images.shape[3] == 3
    first = images.ndim == 4 and images.shape[1] == 3
    if images.dtype != np.uint8 or not (grey or last or first) or 0 in images.shape[1:]:
        raise UserError(
            f"{name} is {images.dtype} {images.shape}; expected uint8 (N, H, W, 3), (N, 3, H, W) or (N, H, W)"
        )
    pixels = images.astype(np.uint8, copy=False)
    return pixels if grey or last else np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))


# The 1,797 handwritten digits that scikit-learn carries: real data without a download.

CLASSES = [str(digit) for digit in range(10)]


class Digits(ImageDataset):
    """8×8 digits, light on black: 1,437 to train and 360 to validate, in the same mix of classes.

    The split is always the same one, whatever the seed of a training run.
    """

    def __init__(self, split: Split) -> None:
        check_split(split)
        images, labels = _load()
        self.spec = "digits"
        self.classes = list(CLASSES)
        self.rows = _rows(split)  # (n,): where each item is in scikit-learn's set
        self.images = images[self.rows]  # (n, 8, 8) uint8
        self.labels = labels[self.rows]  # (n,)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]).convert("RGB"), int(self.labels[index])

    def path(self, index: int) -> str:
        """``digits[17]`` is row 17 of scikit-learn's set, so the two splits share no name."""
        return f"digits[{self.rows[index]}]"


@cache
def _load() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), from 0..16
    return images, bunch.target.astype(np.int64)


@cache
def _rows(split: Split) -> NDArray[np.int64]:
    from sklearn.model_selection import train_test_split

    _, labels = _load()
    train, val = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    return np.sort(train if split == "train" else val)
