"""Datasets that timm reads: tar shards (webdataset) and datasets of the Hugging Face Hub."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from itertools import repeat
from typing import Any

from PIL import Image
from torch.utils.data import get_worker_info

from visualtokens.data.base import Encoded, ImageDataset, ImageStream, Share, Split, check_split, derive_seed
from visualtokens.data.decode import BadImage, decode_image
from visualtokens.errors import UserError

IMAGE_KEYS = ("jpg", "jpeg", "png", "webp")
SPLIT_NAMES = {"train": ("train",), "val": ("validation", "val", "valid", "test")}  # in order of preference


class TarShards(ImageStream):
    """A folder, or another location webdataset can read, with tar shards and timm's ``_info.json``.

    The file describes the splits as timm writes them: ``{"splits": {"train": {"name": "train", "num_samples":
    …, "filenames": […], "shard_lengths": […]}, …}}``, beside ``"classes"`` (the names) or ``"num_classes"``.
    A sample is ``<key>.jpg`` (or png, webp) and ``<key>.cls`` with its class number.
    """

    def __init__(self, root: str, split: Split) -> None:
        check_split(split)
        self.spec = f"wds:{root}"
        self.root = os.path.expanduser(root)
        info = _read_info(self.root)
        self.split = _shard_split(info, split, self.root)
        self.classes = _shard_classes(info, self.root)
        described = info["splits"][self.split]
        self.files: list[str] = list(described["filenames"])
        self.lengths: list[int] = list(described["shard_lengths"])
        if len(self.files) != len(self.lengths) or sum(self.lengths) != described["num_samples"]:
            raise UserError(
                f"{self.root}/_info.json contradicts itself about {self.split!r}: {len(self.files)} files, "
                f"{len(self.lengths)} shard_lengths that sum to {sum(self.lengths)}, "
                f"num_samples {described['num_samples']}"
            )

    def __len__(self) -> int:
        return sum(self.lengths)

    @property
    def most_shares(self) -> int:
        return len(self.files)

    def count(self, share: Share) -> int:
        return sum(self.lengths[share.part :: share.parts])

    def read(self, share: Share) -> Iterator[Encoded]:
        return map(self._encoded, self._samples(share, train=False, seed=0, epoch=0))

    def read_shuffled(self, share: Share, *, seed: int, epoch: int) -> Iterator[Encoded]:
        samples = self._samples(share, train=True, seed=seed, epoch=epoch)
        # A share with fewer images than the others starts over.
        return (self._encoded(sample) for again in repeat(samples) for sample in again)

    def _samples(self, share: Share, *, train: bool, seed: int, epoch: int) -> Any:
        """timm's pipeline of one share, up to where it decodes and drops what it cannot read."""
        reader_wds = _webdataset_reader()
        reader = reader_wds.ReaderWds(
            self.root, split=self.split, is_training=train, seed=derive_seed(seed, 0)
        )
        # timm would derive these from the process group and the worker, which do not know the epoch of a
        # resumed run.
        reader.worker_info = get_worker_info() or "this process"
        reader.worker_seed = derive_seed(seed, epoch, share.part)
        reader.global_worker_id, reader.global_num_workers = share.part, share.parts
        reader.set_epoch(epoch)
        reader._lazy_init()
        return reader_wds.wds.DataPipeline(*reader.ds.pipeline[:-2])

    def _encoded(self, sample: dict[str, Any]) -> Encoded:
        name = f"{sample.get('__url__', self.root)}/{sample['__key__']}"
        key = next((key for key in IMAGE_KEYS if key in sample), None)
        try:
            label = int(sample["cls"])
        except (KeyError, ValueError) as error:
            raise UserError(f"{name} has no class number in its .cls") from error
        if not 0 <= label < len(self.classes):
            raise UserError(f"{name} is of class {label}, but there are {len(self.classes)} classes")
        return Encoded(sample[key] if key else b"", label, name if key is None else f"{name}.{key}")


def _read_info(root: str) -> dict[str, Any]:
    info = _webdataset_reader()._load_info(root)
    if not isinstance(info.get("splits"), dict):
        raise UserError(f"{root} has no _info.json with its splits; see visualtokens.data.timm_readers")
    return info


def _shard_split(info: dict[str, Any], split: Split, root: str) -> str:
    for name in SPLIT_NAMES[split]:
        if name in info["splits"]:
            missing = {"num_samples", "filenames", "shard_lengths", "name"} - set(info["splits"][name])
            if missing:
                raise UserError(f"{root}/_info.json lacks {', '.join(sorted(missing))} of split {name!r}")
            return name
    raise UserError(f"{root}/_info.json has no {split} split, only {', '.join(info['splits']) or 'none'}")


def _shard_classes(info: dict[str, Any], root: str) -> list[str]:
    if "classes" in info:
        return [str(name) for name in info["classes"]]
    if "num_classes" in info:
        return [str(number) for number in range(int(info["num_classes"]))]
    raise UserError(f'{root}/_info.json has neither "classes" nor "num_classes"; add one of them')


def _webdataset_reader() -> Any:
    from timm.data.readers import reader_wds

    if reader_wds.wds is None:
        raise UserError("tar shards need webdataset; install it with: pip install 'visualtokens[data]'")
    return reader_wds


class HubImages(ImageDataset):
    """A dataset that ``datasets.load_dataset`` opens by name: on the Hub, or a local folder.

    The first image column and the first class-label column are used. The validation split is the first of
    validation, val, valid and test that exists.
    """

    def __init__(self, name: str, split: Split) -> None:
        check_split(split)
        self.spec = f"hfds:{name}"
        chosen, features = _hub_split(name, split)
        image, label = _hub_columns(name, features)
        self._reader = _hub_reader().ReaderHfds(name, split=chosen, input_key=image, target_key=label)
        self.classes = list(features[label].names)
        self._name = f"{self.spec}[{chosen}]"
        if len(self._reader) == 0:
            raise UserError(f"{self._name} holds no images")

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        try:
            stream, label = self._reader[index]
        except (OSError, AssertionError) as error:  # a row without bytes whose file is missing
            raise BadImage(self.path(index), f"cannot be opened: {error}") from error
        with stream:
            return decode_image(stream, self.path(index)), int(label)

    def path(self, index: int) -> str:
        return f"{self._name}[{index}]"


def _hub_split(name: str, split: Split) -> tuple[str, Any]:
    """The dataset's own name of the split, and its columns."""
    datasets = _hub_reader().datasets
    try:
        names = list(datasets.get_dataset_split_names(name))
        chosen = next((each for each in SPLIT_NAMES[split] if each in names), None)
        if chosen is None:
            raise UserError(f"hfds:{name} has no {split} split, only {', '.join(names)}")
        # The dataset's description may lack the columns. timm's second load comes from the cache.
        return chosen, datasets.load_dataset(name, split=chosen).features
    except UserError:
        raise
    except (OSError, ValueError) as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(f"hfds:{name} cannot be opened: {text}") from error


def _hub_columns(name: str, features: Any) -> tuple[str, str]:
    kinds = {column: type(feature).__name__ for column, feature in (features or {}).items()}
    images = [column for column, kind in kinds.items() if kind == "Image"]
    labels = [column for column, kind in kinds.items() if kind == "ClassLabel"]
    if not images or not labels:
        raise UserError(f"hfds:{name} needs a column of images and one of class labels; it has {kinds}")
    return images[0], labels[0]


def _hub_reader() -> Any:
    # timm's reader prints a message when the library is missing, so check before importing it.
    if importlib.util.find_spec("datasets") is None:
        raise UserError(
            "Hugging Face datasets need the library; install it with: pip install 'visualtokens[data]'"
        )
    from timm.data.readers import reader_hfds

    if not sys.stderr.isatty():
        reader_hfds.datasets.disable_progress_bars()
    return reader_hfds
