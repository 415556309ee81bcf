"""What a loader hands out, and how the work of making it is divided among processes."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Sampler, get_worker_info

from visualtokens.data.base import Share, check_seed, generator
from visualtokens.data.decode import BadImage
from visualtokens.data.transforms import Augment, Preprocess, pixels
from visualtokens.errors import UserError

# In which order the items of a dataset are loaded, and which of them one process takes.


@dataclass(frozen=True)
class Key:
    """What decides an item. The epoch travels with the index because workers outlive an epoch."""

    epoch: int
    index: int


class Order(Sampler[list[Key]]):
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

    def __iter__(self) -> Iterator[list[Key]]:
        epoch = self.epoch
        order = np.arange(self.items)
        if self.seed is not None:
            order = generator(self.seed, epoch).permutation(self.items)
        for begin in range(self.start * self.batch, self.items, self.batch):
            whole = order[begin : begin + self.batch]
            yield [Key(epoch, index) for index in whole[self.share.of(len(whole))].tolist()]


# Processes and threads that prepare images.


@functools.cache
def thread_pool(threads: int) -> ThreadPoolExecutor:
    """Threads of this process. Decoding and resizing run at the same time; they do not need Python."""
    return ThreadPoolExecutor(threads, thread_name_prefix="images")


def settle_worker(worker: int) -> None:
    """Leave signals to the process that trains.

    Ctrl-C, and a scheduler that ends a job, signal every process of it. The one that trains wants to
    finish its step; it cannot without its workers. They end when it tells them to, or is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # without it, nobody can tell who sent a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    """Obey SIGTERM of the parent only."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        continue
    os._exit(0)


def share_from_worker(tensors: Iterable[Tensor]) -> None:
    """In a worker, move the tensors of a batch to memory that the process that trains can read.

    Left to the queue's thread, the copies would start up that thread's parallel runtime, whose locks a fork
    may have left taken: the worker would hang.
    """
    if get_worker_info() is not None:
        for tensor in tensors:
            tensor.share_memory_()


def check_loading(*, batch: int, seed: int, workers: int, share: Share) -> None:
    """:class:`UserError` for the first option of a loader that cannot work."""
    if batch < 1:
        raise UserError(f"batch={batch} is not a number of images; give at least 1")
    if workers < 0:
        raise UserError(f"workers={workers} is negative; 0 loads in this process")
    check_seed(seed)
    if batch < share.parts:
        raise UserError(f"batch={batch} is less than one image for each of {share.parts} processes")


# What a loader hands out.


@dataclass(frozen=True, eq=False)
class Batch:
    """The readable images of up to ``batch`` items, possibly none, and what was wrong with the others."""

    images: Tensor  # (B, 3, H, W) float32
    labels: Tensor  # (B,) int64
    index: Tensor  # (B,) int64: the item of the dataset, or how many items of its stream came before
    bad: tuple[BadImage, ...]

    def __len__(self) -> int:
        """How many images there are."""
        return len(self.images)

    def to(self, device: torch.device, *, memory_format: torch.memory_format) -> Batch:
        """Images and labels on the device, the images in that order of memory."""
        images = self.images.to(device, memory_format=memory_format, non_blocking=True)
        return replace(self, images=images, labels=self.labels.to(device, non_blocking=True))

    def split(self, parts: int) -> list[Batch]:
        """Divide the images into several batches; the first one takes ``bad`` along."""
        if parts == 1:
            return [self]
        pieces = []
        for part in range(parts):
            places = torch.from_numpy(Share(part, parts).of(len(self)))
            bad = () if part else self.bad
            pieces.append(Batch(self.images[places], self.labels[places], self.index[places], bad))
        return pieces

    def pin_memory(self) -> Batch:
        """In memory from which a GPU copies without waiting; ``DataLoader`` asks for it."""
        return Batch(self.images.pin_memory(), self.labels.pin_memory(), self.index, self.bad)


# From images to a batch.


@dataclass(frozen=True, eq=False)
class Item:
    """One image on its way into a batch."""

    values: Tensor  # (H, W, 3) uint8
    label: int
    index: int
    augment: Augment  # what is left to do once the values are normalised
    rng: np.random.Generator


def prepare(
    image: Image.Image,
    label: int,
    index: int,
    *,
    preprocess: Preprocess,
    augment: Augment,
    rng: np.random.Generator,
) -> Item:
    """Change the image at random and bring it to the model's size."""
    return Item(pixels(augment(image, preprocess, rng)), label, index, augment, rng)


@dataclass(frozen=True)
class Collate:
    """Makes one batch of items and of what could not be read."""

    preprocess: Preprocess

    def __call__(self, items: list[Item | BadImage]) -> Batch:
        good = [item for item in items if isinstance(item, Item)]
        bad = tuple(item for item in items if isinstance(item, BadImage))
        empty = torch.empty(0, *self.preprocess.size, 3, dtype=torch.uint8)
        values = torch.stack([item.values for item in good]) if good else empty  # (B, H, W, 3)
        batch = Batch(
            self.preprocess.normalise(values),
            torch.tensor([item.label for item in good], dtype=torch.int64),
            torch.tensor([item.index for item in good], dtype=torch.int64),
            bad,
        )
        for item, image in zip(good, batch.images, strict=True):
            item.augment.add_noise(image, item.rng)
        share_from_worker((batch.images, batch.labels, batch.index))
        return batch
