"""Datasets by the name a command line gives them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from visualtokens.data.arrays import Digits, NpzImages
from visualtokens.data.base import ImageDataset, Split, check_split
from visualtokens.data.decode import BadImage, decode_image
from visualtokens.data.folder import ImageFolder
from visualtokens.data.scenes import DigitScenes
from visualtokens.data.shards import TarShards
from visualtokens.errors import UserError, unknown

KINDS = ("digits", "digit_scenes", "folder", "npz", "wds", "hfds")


def open_dataset(spec: str, split: Split, *, seed: int = 0) -> ImageDataset:
    """The dataset that ``spec`` names.

    ======================  =================================================================
    ``digits``              scikit-learn's handwritten digits, 8×8
    ``digit_scenes``        those digits on cluttered canvases of 128×128
    ``digit_scenes:96x160`` the same, 96 high and 160 wide
    ``folder:/path``        ``/path/train/<class>/*.jpg`` and ``/path/val/<class>/*.jpg``
    ``npz:/path/file.npz``  uint8 arrays, see :class:`~visualtokens.data.arrays.NpzImages`
    ``wds:/path``           tar shards, see :class:`~visualtokens.data.shards.TarShards`
    ``hfds:name``           of the Hugging Face Hub, see :class:`~visualtokens.data.catalog.HubImages`
    ======================  =================================================================

    ``seed`` decides which scenes ``digit_scenes`` makes; nothing in the other datasets is random.
    """
    kind, _, rest = spec.partition(":")
    if kind == "digits":
        if rest:
            raise UserError(f"{spec!r}: digits has no options; write 'digits'")
        return Digits(split)
    if kind == "digit_scenes":
        return DigitScenes(split, size=_size(spec, rest) if rest else (128, 128), seed=seed)
    if kind in KINDS and not rest:
        raise UserError(f"{spec!r} names no path; write '{kind}:/path'")
    if kind == "folder":
        return ImageFolder(rest, split)
    if kind == "npz":
        return NpzImages(rest, split)
    if kind == "wds":
        return TarShards(rest, split)
    if kind == "hfds":
        return HubImages(rest, split)
    if Path(spec).expanduser().exists():
        prefix = "npz" if spec.endswith(".npz") else "folder"
        raise UserError(f"{spec!r} is a path without its kind; write '{prefix}:{spec}'")
    raise unknown("dataset", kind, KINDS)


def _size(spec: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None:
        raise UserError(
            f"{spec!r}: {text!r} is not a size; write HEIGHTxWIDTH, such as 'digit_scenes:96x160'"
        )
    return int(match[1]), int(match[2])


# Datasets of the Hugging Face Hub, or on disk in its formats, read by timm.

SPLIT_NAMES = {"train": ("train",), "val": ("validation", "val", "valid", "test")}


class HubImages(ImageDataset):
    """``name`` as ``datasets.load_dataset`` takes it: of the Hub, or a local folder.

    The first column of images and the first column of class labels are used; of the splits, to validate,
    the first of validation, val, valid and test that there is.
    """

    def __init__(self, name: str, split: Split) -> None:
        check_split(split)
        self.spec = f"hfds:{name}"
        chosen, features = _describe(name, split)
        image, label = _columns(name, features)
        self._reader = _library().ReaderHfds(name, split=chosen, input_key=image, target_key=label)
        self.classes = list(features[label].names)
        self._name = f"{self.spec}[{chosen}]"
        if len(self._reader) == 0:
            raise UserError(f"{self._name} holds no images")

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        try:
            stream, label = self._reader[index]
        except (OSError, AssertionError) as error:  # a row without bytes whose file is gone
            raise BadImage(self.path(index), f"cannot be opened: {error}") from error
        with stream:
            return decode_image(stream, self.path(index)), int(label)

    def path(self, index: int) -> str:
        return f"{self._name}[{index}]"


def _describe(name: str, split: Split) -> tuple[str, Any]:
    """What the dataset calls the split, and its columns."""
    datasets = _library().datasets
    try:
        names = list(datasets.get_dataset_split_names(name))
        chosen = next((each for each in SPLIT_NAMES[split] if each in names), None)
        if chosen is None:
            raise UserError(f"hfds:{name} has no {split} split, only {', '.join(names)}")
        # Its description may not know the columns yet; loading is quick the second time, when timm does it.
        return chosen, datasets.load_dataset(name, split=chosen).features
    except UserError:
        raise
    except (OSError, ValueError) as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(f"hfds:{name} cannot be opened: {text}") from error


def _columns(name: str, features: Any) -> tuple[str, str]:
    kinds = {column: type(feature).__name__ for column, feature in (features or {}).items()}
    images = [column for column, kind in kinds.items() if kind == "Image"]
    labels = [column for column, kind in kinds.items() if kind == "ClassLabel"]
    if not images or not labels:
        raise UserError(f"hfds:{name} needs a column of images and one of class labels; it has {kinds}")
    return images[0], labels[0]


def _library() -> Any:
    # timm's reader prints when the library is missing, so it is not asked.
    if importlib.util.find_spec("datasets") is None:
        raise UserError(
            "Hugging Face datasets need the library; install it with: pip install 'visualtokens[data]'"
        )
    from timm.data.readers import reader_hfds

    if not sys.stderr.isatty():
        reader_hfds.datasets.disable_progress_bars()
    return reader_hfds
