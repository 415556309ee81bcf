"""Batches of a dataset that are the same whatever the number of workers."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from visualtokens.data.base import ImageDataset, ImageStream, Share, generator
from visualtokens.data.batch import (
    Batch,
    Collate,
    Item,
    Key,
    Order,
    check_loading,
    prepare,
    settle_worker,
    thread_pool,
)
from visualtokens.data.decode import BadImage
from visualtokens.data.shards import create_stream_loader
from visualtokens.data.transforms import Augment, Preprocess, as_augment
from visualtokens.errors import UserError

# Batches of any kind of item, epoch by epoch, the same whatever the number of workers.

I = TypeVar("I")  # noqa: E741  an item on its way into a batch
B = TypeVar("B")  # a batch


class Place(Protocol):
    """Holds where in its epochs a loader is."""

    epoch: int
    start: int

    def __len__(self) -> int: ...


class Loader(Generic[B]):
    """Iterates over the batches of one epoch."""

    def __init__(self, batches: DataLoader[Any], place: Place) -> None:
        self._batches = batches
        self._place = place

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Choose the epoch that the next iteration gives, and with which of its batches it begins.

        The epoch decides the order and the random changes. Batches before ``start`` cost nothing.
        """
        if epoch < 0:
            raise UserError(f"epoch={epoch} is negative; the first epoch is 0")
        if not 0 <= start <= len(self):
            raise UserError(f"start={start} is not one of the {len(self)} batches of an epoch")
        self._place.epoch, self._place.start = epoch, start

    def __len__(self) -> int:
        """The batches of a whole epoch, the same number for every share."""
        return len(self._place)

    def __iter__(self) -> Iterator[B]:
        # Workers are forked here, and must not collect the garbage that this process left: freeing an AVIF
        # decoder waits for its threads, which are not there in a fork, and the worker would hang.
        gc.freeze()
        try:
            return iter(self._batches)
        finally:
            gc.unfreeze()


class Items(Dataset["I | BadImage"], ABC, Generic[I]):
    """Items of a dataset, made ready for a batch."""

    @abstractmethod
    def make(self, key: Key) -> I:
        """One item; ``BadImage`` if it cannot be read."""

    def __getitem__(self, key: Key) -> I | BadImage:
        try:
            return self.make(key)
        except BadImage as bad:
            # A new one, because a caught one keeps the decoder's frames alive through its traceback.
            return BadImage(bad.path, bad.reason)

    def __getitems__(self, keys: list[Key]) -> list[I | BadImage]:
        """The items of a batch. Without workers, all cores prepare it, as nothing else runs meanwhile."""
        threads = 1 if get_worker_info() else min(torch.get_num_threads(), len(keys))
        if threads <= 1:
            return self._every(keys)
        size = -(-len(keys) // threads)
        pieces = [keys[start : start + size] for start in range(0, len(keys), size)]
        return list(chain.from_iterable(thread_pool(threads).map(self._every, pieces)))

    def _every(self, keys: list[Key]) -> list[I | BadImage]:
        return [self[key] for key in keys]


def load_items(
    items: Items[I],
    collate: Callable[[list[I | BadImage]], B],
    *,
    count: int,
    batch: int,
    train: bool,
    seed: int,
    workers: int,
    share: Share,
    pin_memory: bool,
) -> Loader[B]:
    """A loader of what ``collate`` makes of several of the ``count`` items.

    To train, they come in an order that ``seed`` and epoch decide; to judge, in their own. Several processes
    that train together take a ``share`` each of every batch.
    """
    check_loading(batch=batch, seed=seed, workers=workers, share=share)
    order = Order(count, batch, seed if train else None, share)
    batches: DataLoader[Any] = DataLoader(
        items,
        batch_sampler=order,
        num_workers=workers,
        collate_fn=collate,
        persistent_workers=workers > 0,
        pin_memory=pin_memory,
        worker_init_fn=settle_worker,
        # Without its own generator, DataLoader draws from torch's global one.
        generator=torch.Generator().manual_seed(0),
    )
    return Loader(batches, order)


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
) -> Loader[Batch]:
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
    share = share or Share()
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
    return load_items(
        _Items(dataset, preprocess, changes, seed),
        Collate(preprocess),
        count=len(dataset),
        batch=batch,
        train=train,
        seed=seed,
        workers=workers,
        share=share,
        pin_memory=pin_memory,
    )


@dataclass(frozen=True, eq=False)
class _Items(Items[Item]):
    dataset: ImageDataset
    preprocess: Preprocess
    augment: Augment
    seed: int

    def make(self, key: Key) -> Item:
        image, label = self.dataset[key.index]
        rng = generator(self.seed, key.epoch, key.index)
        return prepare(image, label, key.index, preprocess=self.preprocess, augment=self.augment, rng=rng)
