"""Loaders: batches of a dataset, identical for any number of worker processes and threads."""

from __future__ import annotations

import functools
import gc
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from visualtokens.data.base import (
    AnnotatedImages,
    Encoded,
    ImageDataset,
    ImageStream,
    Share,
    check_seed,
    generator,
)
from visualtokens.data.batch import Batch, ImageBatch
from visualtokens.data.decode import BadImage, decode_image, max_pixels
from visualtokens.data.transforms import PRESETS, Augment, Preprocess, as_augment, pixels
from visualtokens.data.workers import errors_as_items, leave_signals_to_parent, raise_errors, sigterm_blocked
from visualtokens.errors import UserError

A = TypeVar("A")  # an augmentation
T = TypeVar("T")  # the annotation of an image
P = TypeVar("P")  # an image with its annotation after preparation, ready to be stacked
B = TypeVar("B", bound=ImageBatch)


class Position(Protocol):
    """Epoch and first batch of the next iteration."""

    epoch: int
    start: int

    def __len__(self) -> int: ...


class Loader(Generic[B]):
    """Iterates over the batches of one epoch."""

    def __init__(self, batches: DataLoader[Any], position: Position) -> None:
        self._batches = batches
        self._position = position

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Select the epoch of the next iteration, and its first batch.

        The epoch determines order and augmentation. Batches before ``start`` cost nothing.
        """
        if epoch < 0:
            raise UserError(f"epoch={epoch} is negative; the first epoch is 0")
        if not 0 <= start <= len(self):
            raise UserError(f"start={start} is not one of the {len(self)} batches of an epoch")
        self._position.epoch, self._position.start = epoch, start

    def __len__(self) -> int:
        """The number of batches of a whole epoch, the same for every share."""
        return len(self._position)

    def __iter__(self) -> Iterator[B]:
        # Workers are forked here and must not collect garbage of this process: freeing an AVIF decoder waits
        # for its threads, which do not exist in a fork, and the worker would hang.
        gc.freeze()
        try:
            with sigterm_blocked():
                return raise_errors(iter(self._batches))
        finally:
            gc.unfreeze()


class Pipeline(ABC, Generic[T, P, B]):
    """From annotated images to the batches of one task."""

    @abstractmethod
    def prepare(self, image: Image.Image, annotation: T, rng: np.random.Generator) -> P:
        """Image and annotation at the model's size, augmented with random numbers of ``rng``."""

    @abstractmethod
    def collate(self, prepared: list[P], index: Tensor, bad: tuple[BadImage, ...]) -> B:
        """The batch of prepared images, possibly none; ``index (B,)`` are their positions in the dataset."""

    def batch(self, items: Sequence[tuple[int, P] | BadImage]) -> B:
        """The batch of indexed items and errors: ``collate_fn`` of a ``DataLoader``."""
        good = [item for item in items if not isinstance(item, BadImage)]
        bad = tuple(item for item in items if isinstance(item, BadImage))
        index = torch.tensor([i for i, _ in good], dtype=torch.int64)
        batch = self.collate([prepared for _, prepared in good], index, bad)
        batch.share_from_worker()
        return batch


@dataclass(frozen=True)
class ClassificationPipeline(Pipeline[int, tuple[Tensor, int, np.random.Generator], Batch]):
    """Augmented, resized and normalised images with their labels."""

    preprocess: Preprocess
    augment: Augment

    def prepare(
        self, image: Image.Image, label: int, rng: np.random.Generator
    ) -> tuple[Tensor, int, np.random.Generator]:
        return pixels(self.augment(image, self.preprocess, rng)), label, rng

    def collate(
        self,
        prepared: list[tuple[Tensor, int, np.random.Generator]],
        index: Tensor,
        bad: tuple[BadImage, ...],
    ) -> Batch:
        empty = torch.empty(0, *self.preprocess.size, 3, dtype=torch.uint8)
        values = torch.stack([image for image, _, _ in prepared]) if prepared else empty  # (B, H, W, 3)
        images = self.preprocess.normalise(values)  # (B, 3, H, W)
        for image, (_, _, rng) in zip(images, prepared, strict=True):
            self.augment.random_erasing(image, rng)
        labels = torch.tensor([label for _, label, _ in prepared], dtype=torch.int64)
        return Batch(images, labels, index, bad)


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
    repeats: int = 1,
) -> Loader[Batch]:
    """A loader of :class:`Batch`.

    For training, items are shuffled and augmented with random numbers that depend on ``seed``, epoch and item
    only; for evaluation, they come in order and unchanged. No global random state is read or modified. Every
    item appears once per epoch, so the last batch may be smaller; an unreadable item is listed in
    ``Batch.bad`` and not replaced. ``augment`` is an :class:`Augment` or a preset: none, digits, photo,
    imagenet, cifar.

    ``repeats`` above 1 is repeated augmentation: an epoch is as long as before, but has that many differently
    augmented copies of fewer images, one after the other.

    Processes that train together each load a ``share`` of every batch; that of the last batch may be empty.
    A stream (tar shards) is divided by whole shards instead: random numbers then also depend on the share and
    the worker, and in training every batch is full.
    """
    pipeline = ClassificationPipeline(preprocess, choose_augment(augment, PRESETS, train=train))
    options: dict[str, Any] = dict(
        batch=batch,
        train=train,
        seed=seed,
        workers=workers,
        share=share or Share(),
        pin_memory=pin_memory,
    )
    if isinstance(dataset, ImageStream):
        if repeats != 1:
            raise UserError(f"repeats={repeats} needs a dataset with random access, not {dataset.spec}")
        return load_stream(dataset, pipeline, **options)
    return load_items(dataset, pipeline, repeats=repeats, **options)


def choose_augment(augment: A | str, presets: Mapping[str, A], *, train: bool) -> A:
    """The augmentation of a loader, given itself or as a preset; evaluation accepts ``none`` only."""
    chosen = as_augment(augment, presets)
    if not train and chosen != presets["none"]:
        raise UserError(f"augment={augment!r} is for training only; leave it out when train=False")
    return chosen


@dataclass(frozen=True)
class Key:
    """Identifies an augmented item. The epoch is part of it because workers outlive an epoch."""

    epoch: int
    index: int
    copy: int = 0  # with repeated augmentation


def load_items(
    dataset: AnnotatedImages[T],
    pipeline: Pipeline[T, Any, B],
    *,
    batch: int,
    train: bool,
    seed: int,
    workers: int,
    share: Share,
    pin_memory: bool,
    repeats: int = 1,
) -> Loader[B]:
    """A loader of a dataset with random access: shuffled by seed and epoch for training, else in order."""
    _check_options(batch=batch, seed=seed, workers=workers, share=share)
    if repeats < 1 or (repeats > 1 and not train):
        raise UserError(f"repeats={repeats} must be at least 1, and 1 for evaluation")
    order = BatchOrder(len(dataset), batch, seed if train else None, share, repeats=repeats)
    batches = _data_loader(
        PreparedItems(dataset, pipeline, seed),
        batch_sampler=order,
        collate_fn=pipeline.batch,
        persistent_workers=workers > 0,
        num_workers=workers,
        pin_memory=pin_memory,
    )
    return Loader(batches, order)


class BatchOrder(Sampler[list[Key]]):
    """The keys of each batch of one share; shuffled for every epoch if there is a seed.

    With ``repeats`` an epoch has the first items of the shuffled order, each that many times.
    """

    def __init__(self, items: int, batch: int, seed: int | None, share: Share, *, repeats: int = 1) -> None:
        self.items = items
        self.repeats = repeats
        self.batch = batch
        self.seed = seed
        self.share = share
        self.epoch = 0
        self.start = 0

    def __len__(self) -> int:
        return -(-self.items // self.batch)

    def __iter__(self) -> Iterator[list[Key]]:
        epoch = self.epoch
        order = np.arange(self.items)
        if self.seed is not None:
            order = generator(self.seed, epoch).permutation(self.items)
        for begin in range(self.start * self.batch, self.items, self.batch):
            places = np.arange(begin, min(begin + self.batch, self.items))
            places = places[self.share.of(len(places))]
            copies = (places % self.repeats).tolist()
            indices = order[places // self.repeats].tolist()
            yield [Key(epoch, index, copy) for index, copy in zip(indices, copies, strict=True)]


@dataclass(frozen=True, eq=False)
class PreparedItems(Dataset["tuple[int, P] | BadImage"], Generic[T, P]):
    """The items of a dataset after the pipeline's ``prepare``."""

    dataset: AnnotatedImages[T]
    pipeline: Pipeline[T, P, Any]
    seed: int

    def __getitem__(self, key: Key) -> tuple[int, P] | BadImage:
        rng = generator(self.seed, key.epoch, key.index, *([key.copy] if key.copy else []))
        try:
            return key.index, self.pipeline.prepare(*self.dataset[key.index], rng)
        except BadImage as bad:
            # A copy: the traceback of the caught one keeps the decoder's frames alive.
            return BadImage(bad.path, bad.reason)

    def __getitems__(self, keys: list[Key]) -> list[tuple[int, P] | BadImage]:
        """The items of a batch; without workers, prepared on all cores, because nothing else runs then."""
        threads = 1 if get_worker_info() else min(torch.get_num_threads(), len(keys))
        if threads <= 1:
            return self._every(keys)
        size = -(-len(keys) // threads)
        pieces = [keys[start : start + size] for start in range(0, len(keys), size)]
        return list(chain.from_iterable(_thread_pool(threads).map(self._every, pieces)))

    def _every(self, keys: list[Key]) -> list[tuple[int, P] | BadImage]:
        return [self[key] for key in keys]


@functools.cache
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    """Decoding and resizing release the GIL, so threads run them in parallel."""
    return ThreadPoolExecutor(threads, thread_name_prefix="images")


def load_stream(
    stream: ImageStream,
    pipeline: Pipeline[int, Any, B],
    *,
    batch: int,
    train: bool,
    seed: int,
    workers: int,
    share: Share,
    pin_memory: bool,
) -> Loader[B]:
    """A loader of a stream: each worker reads its own shards and fills whole batches."""
    _check_options(batch=batch, seed=seed, workers=workers, share=share)
    readers = max(workers, 1)
    if share.parts * readers > stream.most_shares:
        raise UserError(
            f"{stream.spec} has {stream.most_shares} shards for {share.parts} processes of {readers} readers "
            f"each; give at most workers={stream.most_shares // share.parts}, or make more shards"
        )
    if batch % share.parts:
        raise UserError(f"batch={batch} cannot be divided evenly by {share.parts} processes")
    source = StreamBatches(stream, pipeline, batch // share.parts, seed if train else None, share, readers)
    batches = _data_loader(
        source,
        batch_size=None,  # the dataset yields batches
        persistent_workers=False,  # running workers would not see a change of epoch
        num_workers=workers,
        pin_memory=pin_memory,
    )
    return Loader(batches, source)


@dataclass(eq=False)
class StreamBatches(IterableDataset[B]):
    """The batches of a stream; batch t of an epoch comes from reader t modulo the number of readers."""

    stream: ImageStream
    pipeline: Pipeline[int, Any, B]
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
        """Batches of one process that cover its images once, with the same number for every reader."""
        shares = (self._reader_share(part, reader) for reader in range(self.readers))
        return self.readers * max(-(-self.stream.count(share) // self.batch) for share in shares)

    def _reader_share(self, part: int, reader: int) -> Share:
        return Share(part * self.readers + reader, self.share.parts * self.readers)

    def __iter__(self) -> Iterator[B | UserError]:  # type: ignore[override]
        return errors_as_items(self._read())

    def _read(self) -> Iterator[B]:
        worker = get_worker_info()
        # DataLoader takes the first batch from worker 0, whatever ``start`` is.
        first = self.start + (worker.id if worker else 0)
        share = self._reader_share(self.share.part, first % self.readers)
        images = self._images(share, skip=first // self.readers * self.batch)
        for _ in range(first, len(self), self.readers):
            chunk = islice(images, self.batch)
            yield self.pipeline.batch([self._item(encoded, share, index) for index, encoded in chunk])
        if self.seed is None:
            next(images, None)  # the stream raises if it holds more images than it promised

    def _images(self, share: Share, *, skip: int) -> Iterator[tuple[int, Encoded]]:
        if self.seed is None:
            images = self.stream.read(share)
        else:
            images = self.stream.read_shuffled(share, seed=self.seed, epoch=self.epoch)
        return islice(enumerate(images), skip, None)

    def _item(self, encoded: Encoded, share: Share, index: int) -> tuple[int, Any] | BadImage:
        try:
            image = decode_image(io.BytesIO(encoded.data), encoded.name)
        except BadImage as bad:
            return BadImage(bad.path, bad.reason)  # without the decoder's frames
        rng = generator(self.seed or 0, self.epoch, share.part, index)
        return index, self.pipeline.prepare(image, encoded.label, rng)


def _check_options(*, batch: int, seed: int, workers: int, share: Share) -> None:
    if batch < 1:
        raise UserError(f"batch={batch} is not a number of images; give at least 1")
    if workers < 0:
        raise UserError(f"workers={workers} is negative; 0 loads in this process")
    check_seed(seed)
    max_pixels()  # refuses an invalid limit here and not in a worker
    if batch < share.parts:
        raise UserError(f"batch={batch} is less than one image for each of {share.parts} processes")


def _data_loader(source: Dataset[Any], **options: Any) -> DataLoader[Any]:
    # Without its own generator, DataLoader draws from torch's global one.
    seeded = torch.Generator().manual_seed(0)
    return DataLoader(source, worker_init_fn=leave_signals_to_parent, generator=seeded, **options)
