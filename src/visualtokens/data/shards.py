"""Tar shards in the layout of webdataset, read by timm."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from visualtokens.data.base import Encoded, ImageStream, Share, Split, check_split, derive_seed, generator
from visualtokens.data.batch import Batch, Collate, Item, check_loading, prepare, settle_worker
from visualtokens.data.decode import BadImage, decode_image
from visualtokens.data.transforms import Augment, Preprocess
from visualtokens.errors import UserError

IMAGE_KEYS = ("jpg", "jpeg", "png", "webp")
SPLIT_NAMES = {"train": ("train",), "val": ("val", "validation", "test")}


class TarShards(ImageStream):
    """A folder, or another place webdataset can read, with tar shards and timm's ``_info.json``.

    The file tells the splits as timm writes it: ``{"splits": {"train": {"name": "train", "num_samples":
    …, "filenames": […], "shard_lengths": […]}, …}}``, and beside them ``"classes"`` (the names) or
    ``"num_classes"``. A sample is ``<key>.jpg`` (or png, webp) and ``<key>.cls``, the number of its class.
    """

    def __init__(self, root: str, split: Split) -> None:
        check_split(split)
        self.spec = f"wds:{root}"
        self.root = os.path.expanduser(root)
        self.info = _read_info(self.root)
        self.split = _split_name(self.info, split, self.root)
        self.classes = _classes(self.info, self.root)
        described = self.info["splits"][self.split]
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
        pipeline = _pipeline(self.root, self.split, share, train=False, seed=0, epoch=0)
        return map(self._encoded, pipeline)

    def read_shuffled(self, share: Share, *, seed: int, epoch: int) -> Iterator[Encoded]:
        pipeline = _pipeline(self.root, self.split, share, train=True, seed=seed, epoch=epoch)
        # A share of fewer images than the others has starts again until all are done.
        return (self._encoded(sample) for again in repeat(pipeline) for sample in again)

    def _encoded(self, sample: dict[str, Any]) -> Encoded:
        name = f"{sample.get('__url__', self.root)}/{sample['__key__']}"
        key = next((key for key in IMAGE_KEYS if key in sample), None)
        try:
            label = int(sample["cls"])
        except (KeyError, ValueError) as error:
            raise UserError(f"{name} has no number of a class in its .cls") from error
        if not 0 <= label < len(self.classes):
            raise UserError(f"{name} is of class {label}, but there are {len(self.classes)} classes")
        return Encoded(sample[key] if key else b"", label, name if key is None else f"{name}.{key}")


def _pipeline(root: str, split: str, share: Share, *, train: bool, seed: int, epoch: int) -> Any:
    """timm's pipeline of one share, up to where it decodes and drops what it cannot read."""
    from torch.utils.data import get_worker_info

    reader_wds = _library()
    reader = reader_wds.ReaderWds(root, split=split, is_training=train, seed=derive_seed(seed, 0))
    # What timm would work out from the process group and the worker, which do not know the start of a run.
    reader.worker_info = get_worker_info() or "this process"
    reader.worker_seed = derive_seed(seed, epoch, share.part)
    reader.global_worker_id, reader.global_num_workers = share.part, share.parts
    reader.set_epoch(epoch)
    reader._lazy_init()
    return reader_wds.wds.DataPipeline(*reader.ds.pipeline[:-2])


def _read_info(root: str) -> dict[str, Any]:
    info = _library()._load_info(root)
    if not isinstance(info.get("splits"), dict):
        raise UserError(f"{root} has no _info.json that tells its splits; see visualtokens.data.shards")
    return info


def _split_name(info: dict[str, Any], split: Split, root: str) -> str:
    for name in SPLIT_NAMES[split]:
        if name in info["splits"]:
            missing = {"num_samples", "filenames", "shard_lengths", "name"} - set(info["splits"][name])
            if missing:
                raise UserError(f"{root}/_info.json lacks {', '.join(sorted(missing))} of split {name!r}")
            return name
    raise UserError(f"{root}/_info.json has no {split} split, only {', '.join(info['splits']) or 'none'}")


def _classes(info: dict[str, Any], root: str) -> list[str]:
    if "classes" in info:
        return [str(name) for name in info["classes"]]
    if "num_classes" in info:
        return [str(number) for number in range(int(info["num_classes"]))]
    raise UserError(f'{root}/_info.json tells neither "classes" nor "num_classes"; add one of them')


def _library() -> Any:
    from timm.data.readers import reader_wds

    if reader_wds.wds is None:
        raise UserError("tar shards need webdataset; install it with: pip install 'visualtokens[data]'")
    return reader_wds


# Batches of a stream: each worker reads its own shards and fills whole batches.


def create_stream_loader(
    stream: ImageStream,
    preprocess: Preprocess,
    *,
    batch: int,
    train: bool,
    seed: int,
    workers: int,
    augment: Augment,
    share: Share,
    pin_memory: bool,
) -> tuple[DataLoader[Batch], StreamBatches]:
    """The loader of the batches of one process, and the object that holds its epoch."""
    check_loading(batch=batch, seed=seed, workers=workers, share=share)
    readers = max(workers, 1)
    if share.parts * readers > stream.most_shares:
        raise UserError(
            f"{stream.spec} has {stream.most_shares} shards for {share.parts} processes of {readers} readers "
            f"each; give at most workers={stream.most_shares // share.parts}, or make more shards"
        )
    if batch % share.parts:
        raise UserError(f"batch={batch} cannot be divided evenly by {share.parts} processes")
    batches = StreamBatches(
        stream, preprocess, augment, batch // share.parts, seed if train else None, share, readers
    )
    loader = DataLoader(
        batches,
        batch_size=None,  # they are batches already
        num_workers=workers,
        # New workers for every epoch, because only new ones see another epoch on the dataset.
        persistent_workers=False,
        pin_memory=pin_memory,
        worker_init_fn=settle_worker,
        generator=torch.Generator().manual_seed(0),
    )
    return loader, batches


@dataclass(eq=False)
class StreamBatches(IterableDataset[Batch]):
    """Batch t of an epoch comes from reader t modulo the number of readers."""

    stream: ImageStream
    preprocess: Preprocess
    augment: Augment
    batch: int  # images per batch of this process
    seed: int | None  # None: in order, each image once
    share: Share
    readers: int
    epoch: int = 0
    start: int = 0

    def __len__(self) -> int:
        if self.seed is not None:
            return -(-len(self.stream) // (self.batch * self.share.parts))
        return max(self._batches_in_order(part) for part in range(self.share.parts))

    def _batches_in_order(self, part: int) -> int:
        """How many batches it takes to give each image of one process once, every reader as often."""
        shares = (self._reader_share(part, reader) for reader in range(self.readers))
        return self.readers * max(-(-self.stream.count(share) // self.batch) for share in shares)

    def _reader_share(self, part: int, reader: int) -> Share:
        return Share(part * self.readers + reader, self.share.parts * self.readers)

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        # DataLoader asks its first worker first, wherever in the epoch it starts.
        first = self.start + (info.id if info else 0)
        if info or self.readers == 1:
            return self._read(first)
        raise UserError("a loader of several readers needs as many workers")

    def _read(self, first: int) -> Iterator[Batch]:
        """The batches ``first``, ``first + readers``, … of the epoch, which all are of one reader."""
        share = self._reader_share(self.share.part, first % self.readers)
        done = first // self.readers * self.batch  # images that earlier batches had
        images = self._images(share, skip=done)
        collate = Collate(self.preprocess)
        for _ in range(first, len(self), self.readers):
            chunk = list(islice(images, self.batch))
            yield collate([self._item(encoded, share, index) for index, encoded in chunk])

    def _images(self, share: Share, *, skip: int) -> Iterator[tuple[int, Encoded]]:
        if self.seed is None:
            images = self.stream.read(share)
        else:
            images = self.stream.read_shuffled(share, seed=self.seed, epoch=self.epoch)
        return islice(enumerate(images), skip, None)

    def _item(self, encoded: Encoded, share: Share, index: int) -> Item | BadImage:
        try:
            image = decode_image(io.BytesIO(encoded.data), encoded.name)
        except BadImage as bad:
            return BadImage(bad.path, bad.reason)  # without the decoder's frames
        rng = generator(self.seed or 0, self.epoch, share.part, index)
        return prepare(image, encoded.label, index, preprocess=self.preprocess, augment=self.augment, rng=rng)
