"""Datasets that timm reads: tar shards (webdataset) and datasets of the Hugging Face Hub."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import stat
import sys
import tarfile
from collections.abc import Iterator
from itertools import chain
from typing import Any
from urllib.parse import urlparse

from PIL import Image

from visualtokens.data.base import (
    MAX_IMAGES,
    Encoded,
    ImageDataset,
    ImageStream,
    Share,
    Split,
    brief,
    check_class_count,
    check_split,
    derive_seed,
    is_inside,
    is_int,
)
from visualtokens.data.decode import BadImage, decode_image
from visualtokens.data.walk import DAMAGE, MAX_FILE_BYTES, META_FILE
from visualtokens.errors import UserError
from visualtokens.files import one_line

REMOTE = ("http", "https", "s3", "gs")
IMAGE_KEYS = ("jpg", "jpeg", "png", "webp")
SPLIT_NAMES = {  # in order of preference
    "train": ("train",),
    "val": ("validation", "val", "valid", "test"),
    "test": ("test",),
}
MAX_INFO_BYTES = 2**25  # of _info.json; 200,000 shards take about 8 MB


class TarShards(ImageStream):
    """A folder, or another location webdataset can read, with tar shards and timm's ``_info.json``.

    The file describes the splits as timm writes them: ``{"splits": {"train": {"name": "train", "num_samples":
    …, "filenames": […], "shard_lengths": […]}, …}}``, beside ``"classes"`` (the names) or ``"num_classes"``.
    File names are relative to the folder. A sample is ``<key>.jpg`` (or png, webp) and ``<key>.cls`` with its
    class number.

    The file is validated on opening, and every local shard must be a tar archive. A shard that cannot be read
    to its end, or that holds another number of samples than its entry in ``shard_lengths``, raises
    :class:`UserError` when it is read.
    """

    def __init__(self, root: str, split: Split) -> None:
        check_split(split)
        self.spec = f"wds:{root}"
        self.root = os.path.expanduser(root.removeprefix("file://").removeprefix("file:"))
        if not _is_local(self.root):
            _check_remote(self.root)
        file, info = _read_info(self.root)
        self.classes = _shard_classes(info, file)
        self.split, self.files, self.lengths = _shard_split(info, split, file)
        if _is_local(self.root):
            for name in self.files:
                _check_archive(os.path.join(self.root, name))
        else:
            for name in self.files:
                _check_remote(f"{self.root}/{name}")

    def __len__(self) -> int:
        return sum(self.lengths)

    @property
    def most_shares(self) -> int:
        return len(self.files)

    def count(self, share: Share) -> int:
        return sum(self.lengths[share.part :: share.parts])

    def read(self, share: Share) -> Iterator[Encoded]:
        return chain.from_iterable(map(self._read_shard, range(share.part, len(self.files), share.parts)))

    def read_shuffled(self, share: Share, *, seed: int, epoch: int) -> Iterator[Encoded]:
        if not self.count(share):
            raise UserError(f"{self.spec} has {len(self.files)} shards, none for part {share.part + 1}")
        reader = _webdataset_reader()
        rng = random.Random(derive_seed(seed, 0) + epoch)  # the same order of shards for every share
        shards = list(reader.wds.shuffle(500, initial=100, rng=rng)(iter(range(len(self.files)))))
        rng = random.Random(derive_seed(seed, epoch, share.part))
        shuffle = reader.wds.shuffle(reader.SAMPLE_SHUFFLE_SIZE, initial=reader.SAMPLE_INITIAL_SIZE, rng=rng)
        while True:  # a share with fewer images than the others starts over
            yield from shuffle(chain.from_iterable(map(self._read_shard, shards[share.part :: share.parts])))

    def _read_shard(self, number: int) -> Iterator[Encoded]:
        """The samples of a shard; UserError if their number is not the promised one."""
        url, promised, read = os.path.join(self.root, self.files[number]), self.lengths[number], 0
        try:
            for read, sample in enumerate(_samples(url), 1):
                if read > promised:
                    break
                yield self._encoded(sample)
        except UserError:
            raise
        except DAMAGE as error:
            raise UserError(
                f"{url} cannot be read after {read} of its {promised} samples ({one_line(error)}); "
                "make the shard again"
            ) from error
        if read != promised:
            found = f"more than {promised}" if read > promised else f"only {read}"
            raise UserError(
                f"{url} holds {found} samples, but _info.json promises {promised} in shard_lengths; "
                "make the shard again or correct _info.json"
            )

    def _encoded(self, sample: dict[str, Any]) -> Encoded:
        name = f"{sample['__url__']}/{sample['__key__']}"
        key = next((key for key in IMAGE_KEYS if key in sample), None)
        try:
            label = int(sample["cls"])
        except (KeyError, ValueError) as error:
            raise UserError(f"{name} has no class number in its .cls") from error
        if not 0 <= label < len(self.classes):
            raise UserError(f"{name} is of class {label}; expected 0 to {len(self.classes) - 1}")
        return Encoded(sample[key] if key else b"", label, name if key is None else f"{name}.{key}")


def _samples(url: str) -> Iterator[dict[str, Any]]:
    """The samples of one shard: its files by extension, in groups of the same key."""
    from webdataset.tariterators import group_by_keys

    return group_by_keys(_tar_files(url))


def _tar_files(url: str) -> Iterator[dict[str, Any]]:
    """The files of one shard, as webdataset's ``group_by_keys`` takes them.

    webdataset's own iterator reads files of any size into memory.
    """
    opened = _webdataset_reader().wds.gopen(url)
    with opened as stream, tarfile.open(fileobj=stream, mode="r|*") as tar:
        for member in tar:
            if member.size > MAX_FILE_BYTES:
                raise UserError(
                    f"{url}/{member.name} has {member.size:,} bytes; a file may have {MAX_FILE_BYTES:,}"
                )
            content = tar.extractfile(member) if member.isreg() else None
            if content is not None and not META_FILE.match(member.name):
                yield {"fname": member.name, "data": content.read(), "__url__": url}
            tar.members = []  # type: ignore[attr-defined]  # it would keep all of them


def _is_local(root: str) -> bool:
    return not urlparse(root).scheme


def _check_remote(url: str) -> None:
    """Raise unless the URL is safe: webdataset hands it to a shell, and runs what follows ``pipe:``."""
    if urlparse(url).scheme not in REMOTE or not re.fullmatch(r"[\w.:/@%+=~-]+", url, re.ASCII):
        raise UserError(
            f"{brief(url)} is not opened: shards are read from folders or from {', '.join(REMOTE)} addresses "
            "of letters, digits and ._-/:@%+=~"
        )


def _check_archive(path: str) -> None:
    """Raise unless the local file starts as a tar archive does."""
    _check_regular(path, "a shard that _info.json lists")
    try:
        with tarfile.open(path) as tar:
            first = tar.next()
    except DAMAGE as error:
        raise UserError(f"{path} is not a tar archive; make the shard again") from error
    if first is None:
        raise UserError(f"{path} is an empty tar archive; make the shard again or take it out of _info.json")


def _check_regular(path: str, what: str) -> None:
    """Raise unless the path is a file with content; opening a named pipe would block."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise UserError(f"{path[:200]}, {what}, cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}, {what}, is not a regular file")
    if status.st_size == 0:
        raise UserError(f"{path}, {what}, is empty")


def _read_info(root: str) -> tuple[str, dict[str, Any]]:
    """The name and the content of ``_info.json``, or of ``info.json``."""
    reader, reason = _webdataset_reader(), ""
    for name in ("_info.json", "info.json"):
        file = os.path.join(root, name)
        if _is_local(root):
            if not os.path.lexists(file):
                continue
            _check_regular(file, "the description of the shards")
        try:
            with reader.wds.gopen(file) as stream:
                text = stream.read(MAX_INFO_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = f" ({one_line(error)})"
            continue
        if len(text) > MAX_INFO_BYTES:
            raise UserError(f"{file} has more than {MAX_INFO_BYTES:,} bytes")
        try:
            info = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file} is not JSON: {error}") from error
        if not isinstance(info, dict) or not isinstance(info.get("splits"), dict):
            raise UserError(f'{file} has no "splits"; see visualtokens.data.timm_readers')
        return file, info
    raise UserError(f"{root} has no _info.json{reason}; see visualtokens.data.timm_readers")


def _shard_split(info: dict[str, Any], split: Split, file: str) -> tuple[str, list[str], list[int]]:
    """The name of the split in the file, its shards, and their numbers of samples."""
    splits = info["splits"]
    name = next((name for name in SPLIT_NAMES[split] if name in splits), None)
    if name is None:
        raise UserError(
            f"{file} has no {split} split, only {', '.join(map(brief, list(splits)[:5])) or 'none'}"
        )
    described = splits[name]
    if not isinstance(described, dict):
        raise UserError(f"{file}: split {name!r} is {brief(described)}, not an object with fields")
    missing = {"num_samples", "filenames", "shard_lengths", "name"} - set(described)
    if missing:
        raise UserError(f"{file} lacks {', '.join(sorted(missing))} of split {name!r}")
    files, lengths, total = described["filenames"], described["shard_lengths"], described["num_samples"]

    def wrong(field: str, value: Any, expected: str) -> UserError:
        return UserError(f"{file}: {field} of split {name!r} has {brief(value)}; expected {expected}")

    for field, value in (("filenames", files), ("shard_lengths", lengths)):
        if not isinstance(value, list) or not value:
            raise wrong(field, value, "a list with an entry for each shard")
    for each in files:
        if not isinstance(each, str) or not each or not is_inside(each):
            raise wrong("filenames", each, "file names relative to the folder, without ..")
    for field, counts in (("shard_lengths", lengths), ("num_samples", [total])):
        for count in counts:
            if not is_int(count) or not 1 <= count <= MAX_IMAGES:
                raise wrong(field, count, f"an integer from 1 to {MAX_IMAGES:,}")
    if len(files) != len(lengths) or sum(lengths) != total:
        raise UserError(
            f"{file} contradicts itself about {name!r}: {len(files)} files, "
            f"{len(lengths)} shard_lengths that sum to {sum(lengths)}, num_samples {total}"
        )
    return name, files, lengths


def _shard_classes(info: dict[str, Any], file: str) -> list[str]:
    if "classes" in info:
        names = info["classes"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"{file}: classes are {brief(names)}; expected a list of names")
        check_class_count(len(names), file)
        return names
    if "num_classes" in info:
        count = info["num_classes"]
        if not is_int(count):
            raise UserError(f"{file}: num_classes is {brief(count)}; expected an integer")
        check_class_count(count, file)
        return [str(number) for number in range(count)]
    raise UserError(f'{file} has neither "classes" nor "num_classes"; add one of them')


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
        check_class_count(len(self.classes), self.spec)
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
        raise UserError(f"hfds:{name} cannot be opened: {one_line(error)}") from error


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
