"""Batches of a stream: each worker reads its own shards and fills whole batches."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from visualtokens.data.augment import Augment
from visualtokens.data.base import Encoded, ImageStream
from visualtokens.data.batch import Batch
from visualtokens.data.collate import Collate, Item, prepare
from visualtokens.data.decode import BadImage, decode_image
from visualtokens.data.epochs import check_loading
from visualtokens.data.preprocess import Preprocess
from visualtokens.data.randomness import generator
from visualtokens.data.share import Share
from visualtokens.data.workers import settle_worker
from visualtokens.errors import UserError


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
