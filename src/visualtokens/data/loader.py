"""Batches of a dataset that are the same whatever the number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from visualtokens.data.augment import Augment, as_augment
from visualtokens.data.base import ImageDataset, ImageStream
from visualtokens.data.batch import Batch
from visualtokens.data.collate import Collate, Item, prepare
from visualtokens.data.decode import BadImage
from visualtokens.data.preprocess import Preprocess
from visualtokens.data.randomness import check_seed, generator
from visualtokens.data.share import Share
from visualtokens.data.stream_loader import StreamBatches, create_stream_loader
from visualtokens.data.workers import settle_worker, thread_pool
from visualtokens.errors import UserError


class Loader:
    """Iterates over the batches of one epoch; made by :func:`create_loader`."""

    def __init__(
        self, batches: DataLoader[Item | BadImage] | DataLoader[Batch], order: _Order | StreamBatches
    ) -> None:
        self._batches = batches
        self._order = order

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Choose the epoch that the next iteration gives, and with which of its batches it begins.

        The epoch decides the order and the random changes. Batches before ``start`` cost nothing.
        """
        if epoch < 0:
            raise UserError(f"epoch={epoch} is negative; the first epoch is 0")
        if not 0 <= start <= len(self):
            raise UserError(f"start={start} is not one of the {len(self)} batches of an epoch")
        self._order.epoch, self._order.start = epoch, start

    def __len__(self) -> int:
        """The batches of a whole epoch, the same number for every share."""
        return len(self._order)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def create_loader(
    dataset: ImageDataset,
    preprocess: Preprocess,
    *,
    batch: int,
    train: bool,
    seed: int = 0,
    workers: int = 0,
    augment: Augment | str = "none",
    share: Share | None = None,
    pin_memory: bool = False,
) -> Loader:
    """A loader of :class:`Batch`.

    To train, items come shuffled and augmented, each by random numbers that depend on ``seed``, epoch
    and item only; to evaluate, in order and unchanged. No random state outside is read or moved. Every
    item appears once per epoch, so the last batch may be smaller; one that cannot be read is listed in
    ``Batch.bad`` and not replaced. ``augment`` is an :class:`Augment` or a preset: none, digits, photo,
    imagenet, cifar.

    Several processes that train together take a ``share`` each of every batch; a share of the last one
    may be empty. A stream (tar shards) is shared by whole shards instead: random numbers then depend on
    the share and the worker too, and to train, every batch is full.
    """
    changes = as_augment(augment)
    if not train and changes != Augment():
        raise UserError(f"augment={augment!r} is for training only; leave it out when train=False")
    if batch < 1:
        raise UserError(f"batch={batch} is not a number of images; give at least 1")
    if workers < 0:
        raise UserError(f"workers={workers} is negative; 0 loads in this process")
    check_seed(seed)
    share = share or Share()
    if batch < share.parts:
        raise UserError(f"batch={batch} is less than one image for each of {share.parts} processes")
    if isinstance(dataset, ImageStream):
        loader, batches = create_stream_loader(
            dataset,
            preprocess,
            batch=batch,
            train=train,
            seed=seed,
            workers=workers,
            augment=changes,
            share=share,
            pin_memory=pin_memory,
        )
        return Loader(loader, batches)
    order = _Order(len(dataset), batch, seed if train else None, share)
    return Loader(
        DataLoader(
            _Items(dataset, preprocess, changes, seed),
            batch_sampler=order,
            num_workers=workers,
            collate_fn=Collate(preprocess),
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            worker_init_fn=settle_worker,
            # Without its own generator, DataLoader draws from torch's global one.
            generator=torch.Generator().manual_seed(0),
        ),
        order,
    )


@dataclass(frozen=True)
class _Key:
    """What decides an item. The epoch travels with the index because workers outlive an epoch."""

    epoch: int
    index: int


class _Order(Sampler[list[_Key]]):
    """The items of each batch, shuffled anew every epoch if there is a seed."""

    def __init__(self, items: int, batch: int, seed: int | None, share: Share) -> None:
        self.items = items
        self.batch = batch
        self.seed = seed
        self.share = share
        self.epoch = 0
        self.start = 0

    def __len__(self) -> int:
        return -(-self.items // self.batch)

    def __iter__(self) -> Iterator[list[_Key]]:
        epoch = self.epoch
        order = torch.arange(self.items).numpy()
        if self.seed is not None:
            order = generator(self.seed, epoch).permutation(self.items)
        for begin in range(self.start * self.batch, self.items, self.batch):
            whole = order[begin : begin + self.batch]
            yield [_Key(epoch, index) for index in whole[self.share.of(len(whole))].tolist()]


@dataclass(frozen=True, eq=False)
class _Items(Dataset[Item | BadImage]):
    dataset: ImageDataset
    preprocess: Preprocess
    augment: Augment
    seed: int

    def __getitem__(self, key: _Key) -> Item | BadImage:
        try:
            image, label = self.dataset[key.index]
        except BadImage as bad:
            # A new one, because a caught one keeps the decoder's frames alive through its traceback.
            return BadImage(bad.path, bad.reason)
        rng = generator(self.seed, key.epoch, key.index)
        return prepare(image, label, key.index, preprocess=self.preprocess, augment=self.augment, rng=rng)

    def __getitems__(self, keys: list[_Key]) -> list[Item | BadImage]:
        """The items of a batch. Without workers, all cores prepare it, as nothing else runs meanwhile."""
        threads = 1 if get_worker_info() else min(torch.get_num_threads(), len(keys))
        if threads <= 1:
            return [self[key] for key in keys]
        size = -(-len(keys) // threads)
        pieces = [keys[start : start + size] for start in range(0, len(keys), size)]
        return list(chain.from_iterable(thread_pool(threads).map(self._every, pieces)))

    def _every(self, keys: list[_Key]) -> list[Item | BadImage]:
        return [self[key] for key in keys]
