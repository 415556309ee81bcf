"""Batches of a dataset that are the same whatever the number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from visualtokens.data.augment import Augment, as_augment
from visualtokens.data.base import ImageDataset
from visualtokens.data.decode import BadImage
from visualtokens.data.preprocess import Preprocess, pixels
from visualtokens.data.randomness import check_seed, generator
from visualtokens.errors import UserError


@dataclass(frozen=True, eq=False)
class Batch:
    """The readable images of up to ``batch`` items, possibly none, and what was wrong with the others."""

    images: Tensor  # (B, 3, H, W) float32
    labels: Tensor  # (B,) int64
    index: Tensor  # (B,) int64: the item of the dataset
    bad: tuple[BadImage, ...]


class Loader:
    """Iterates over the batches of one epoch; made by :func:`create_loader`."""

    def __init__(self, batches: DataLoader[_Item | BadImage], order: _Order) -> None:
        self._batches = batches
        self._order = order

    def set_epoch(self, epoch: int) -> None:
        """Choose the order and the random changes of the epoch that the next iteration gives."""
        if epoch < 0:
            raise UserError(f"epoch={epoch} is negative; the first epoch is 0")
        self._order.epoch = epoch

    def __len__(self) -> int:
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
) -> Loader:
    """A loader of :class:`Batch`.

    To train, items come shuffled and augmented, each by random numbers that depend on ``seed``, epoch
    and item only; to evaluate, in order and unchanged. No random state outside is read or moved. Every
    item appears once per epoch, so the last batch may be smaller; one that cannot be read is listed in
    ``Batch.bad`` and not replaced. ``augment`` is an :class:`Augment` or a preset: none, digits, photo.
    """
    changes = as_augment(augment)
    if not train and changes != Augment():
        raise UserError(f"augment={augment!r} is for training only; leave it out when train=False")
    if batch < 1:
        raise UserError(f"batch={batch} is not a number of images; give at least 1")
    if workers < 0:
        raise UserError(f"workers={workers} is negative; 0 loads in this process")
    check_seed(seed)
    order = _Order(len(dataset), batch, seed if train else None)
    batches = DataLoader(
        _Items(dataset, preprocess, changes, seed),
        batch_sampler=order,
        num_workers=workers,
        collate_fn=_Collate(preprocess),
        persistent_workers=workers > 0,
        # Without its own generator, DataLoader draws from torch's global one.
        generator=torch.Generator().manual_seed(0),
    )
    return Loader(batches, order)


@dataclass(frozen=True)
class _Key:
    """What decides an item. The epoch travels with the index because workers outlive an epoch."""

    epoch: int
    index: int


class _Order(Sampler[list[_Key]]):
    """The items of each batch, shuffled anew every epoch if there is a seed."""

    def __init__(self, items: int, batch: int, seed: int | None) -> None:
        self.items = items
        self.batch = batch
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return -(-self.items // self.batch)

    def __iter__(self) -> Iterator[list[_Key]]:
        epoch = self.epoch
        order = list(range(self.items))
        if self.seed is not None:
            order = generator(self.seed, epoch).permutation(self.items).tolist()
        for start in range(0, self.items, self.batch):
            yield [_Key(epoch, index) for index in order[start : start + self.batch]]


@dataclass(frozen=True, eq=False)
class _Item:
    values: Tensor  # (H, W, 3) uint8
    label: int
    index: int


@dataclass(frozen=True, eq=False)
class _Items(Dataset[_Item | BadImage]):
    dataset: ImageDataset
    preprocess: Preprocess
    augment: Augment
    seed: int

    def __getitem__(self, key: _Key) -> _Item | BadImage:
        try:
            image, label = self.dataset[key.index]
        except BadImage as bad:
            # A new one, because a caught one keeps the decoder's frames alive through its traceback.
            return BadImage(bad.path, bad.reason)
        rng = generator(self.seed, key.epoch, key.index)
        return _Item(pixels(self.augment(image, self.preprocess, rng)), label, key.index)


@dataclass(frozen=True)
class _Collate:
    preprocess: Preprocess

    def __call__(self, items: list[_Item | BadImage]) -> Batch:
        good = [item for item in items if isinstance(item, _Item)]
        bad = tuple(item for item in items if isinstance(item, BadImage))
        empty = torch.empty(0, *self.preprocess.size, 3, dtype=torch.uint8)
        values = torch.stack([item.values for item in good]) if good else empty  # (B, H, W, 3)
        batch = Batch(
            self.preprocess.normalise(values),
            torch.tensor([item.label for item in good], dtype=torch.int64),
            torch.tensor([item.index for item in good], dtype=torch.int64),
            bad,
        )
        if get_worker_info() is not None:
            # Left to the queue's thread, the copies to shared memory would start up that thread's parallel
            # runtime, whose locks a fork may have left taken: the worker would hang.
            for tensor in (batch.images, batch.labels, batch.index):
                tensor.share_memory_()
        return batch
