"""Batches of a dataset that are the same whatever the number of workers."""

from __future__ import annotations

from dataclasses import dataclass

from visualtokens.data.augment import Augment, as_augment
from visualtokens.data.base import ImageDataset, ImageStream
from visualtokens.data.batch import Batch
from visualtokens.data.collate import Collate, Item, prepare
from visualtokens.data.epochs import Items, Loader, load_items
from visualtokens.data.order import Key
from visualtokens.data.preprocess import Preprocess
from visualtokens.data.randomness import generator
from visualtokens.data.share import Share
from visualtokens.data.stream_loader import create_stream_loader
from visualtokens.errors import UserError


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
