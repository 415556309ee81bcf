"""Batches of images with masks, the same whatever the number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from visualtokens.data.base import Share, generator
from visualtokens.data.batch import Key, share_from_worker
from visualtokens.data.decode import BadImage
from visualtokens.data.loader import Items, Loader, load_items
from visualtokens.data.segmentation import SegmentationDataset, mirrored_classes
from visualtokens.data.segmentation_transforms import (
    IGNORE,
    SegmentAugment,
    SegmentPreprocess,
    as_segment_augment,
)
from visualtokens.errors import UserError


@dataclass(frozen=True, eq=False)
class SegmentBatch:
    """The readable images of up to ``batch`` items, possibly none, and what was wrong with the others.

    To train, images and masks are crops of one size. To judge, each image has its own size, and its mask
    the size of the original; smaller ones are padded on the right and below, which is no part of them.
    """

    images: Tensor  # (B, 3, H, W) float32
    masks: Tensor  # (B, H', W') uint8, 255 where nobody asks
    image_sizes: Tensor  # (B, 2) int64: height and width without the padding
    mask_sizes: Tensor  # (B, 2) int64
    index: Tensor  # (B,) int64: the item of the dataset
    bad: tuple[BadImage, ...]

    def __len__(self) -> int:
        """How many images there are."""
        return len(self.images)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every image ``(3, H, W)`` and its mask ``(H', W')``, without padding."""
        for i in range(len(self)):
            (height, width), (rows, columns) = self.image_sizes[i].tolist(), self.mask_sizes[i].tolist()
            yield self.images[i, :, :height, :width], self.masks[i, :rows, :columns]

    def to(self, device: torch.device, *, memory_format: torch.memory_format) -> SegmentBatch:
        """Images and masks on the device, the images in that order of memory."""
        images = self.images.to(device, memory_format=memory_format, non_blocking=True)
        return replace(self, images=images, masks=self.masks.to(device, non_blocking=True))

    def split(self, parts: int) -> list[SegmentBatch]:
        """Divide the images into several batches; the first one takes ``bad`` along."""
        if parts == 1:
            return [self]
        pieces = []
        for part in range(parts):
            places = torch.from_numpy(Share(part, parts).of(len(self)))
            pieces.append(
                SegmentBatch(
                    self.images[places],
                    self.masks[places],
                    self.image_sizes[places],
                    self.mask_sizes[places],
                    self.index[places],
                    () if part else self.bad,
                )
            )
        return pieces

    def pin_memory(self) -> SegmentBatch:
        """In memory from which a GPU copies without waiting; ``DataLoader`` asks for it."""
        return replace(self, images=self.images.pin_memory(), masks=self.masks.pin_memory())


def create_segment_loader(
    dataset: SegmentationDataset,
    preprocess: SegmentPreprocess,
    *,
    batch: int,
    train: bool,
    seed: int = 0,
    workers: int = 0,
    augment: SegmentAugment | str = "none",
    share: Share | None = None,
    pin_memory: bool = False,
) -> Loader[SegmentBatch]:
    """A loader of :class:`SegmentBatch`.

    To train, items come shuffled, as crops of the model's size that are varied as ``augment`` says, each by
    random numbers that depend on ``seed``, epoch and item only. To judge, they come in order, whole and
    unchanged. One that cannot be read is listed in ``bad`` and not replaced. Several processes that train
    together take a ``share`` each of every batch.
    """
    changes = as_segment_augment(augment)
    if not train and changes != SegmentAugment():
        raise UserError(f"augment={augment!r} is for training only; leave it out when train=False")
    return load_items(
        _Items(dataset, preprocess, changes if train else None, seed),
        _Collate(preprocess),
        count=len(dataset),
        batch=batch,
        train=train,
        seed=seed,
        workers=workers,
        share=share or Share(),
        pin_memory=pin_memory,
    )


@dataclass(frozen=True, eq=False)
class _Item:
    image: Tensor  # (3, H, W) float32
    mask: Tensor  # (H', W') uint8
    index: int


@dataclass(frozen=True, eq=False)
class _Items(Items[_Item]):
    dataset: SegmentationDataset
    preprocess: SegmentPreprocess
    augment: SegmentAugment | None  # None: whole images
    seed: int

    def make(self, key: Key) -> _Item:
        image, mask = self.dataset[key.index]
        if self.augment is None:
            return _Item(self.preprocess(image), torch.from_numpy(mask.copy()), key.index)
        rng = generator(self.seed, key.epoch, key.index)
        mirror = mirrored_classes(self.dataset.classes)
        pixels, truth = self.augment(image, mask, self.preprocess, rng, mirror=mirror)
        return _Item(self.preprocess.normalise(pixels), truth, key.index)


@dataclass(frozen=True)
class _Collate:
    """Makes one batch of items and of what could not be read."""

    preprocess: SegmentPreprocess

    def __call__(self, items: list[_Item | BadImage]) -> SegmentBatch:
        good = [item for item in items if isinstance(item, _Item)]
        images, image_sizes = _stack([item.image for item in good], 0, self.preprocess.size, channels=(3,))
        masks, mask_sizes = _stack([item.mask for item in good], IGNORE, self.preprocess.size)
        index = torch.tensor([item.index for item in good], dtype=torch.int64)
        bad = tuple(item for item in items if isinstance(item, BadImage))
        batch = SegmentBatch(images, masks, image_sizes, mask_sizes, index, bad)
        share_from_worker((images, masks, image_sizes, mask_sizes, index))
        return batch


def _stack(
    tensors: list[Tensor], fill: int, empty: tuple[int, int], *, channels: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Tensors ``(…, H, W)`` padded to the largest height and width, and what each had: ``(B, 2)``."""
    if not tensors:
        dtype = torch.float32 if channels else torch.uint8
        return torch.empty(0, *channels, *empty, dtype=dtype), torch.empty(0, 2, dtype=torch.int64)
    sizes = torch.tensor([t.shape[-2:] for t in tensors])  # (B, 2)
    height, width = sizes.amax(0).tolist()
    padded = [F.pad(t, (0, width - t.shape[-1], 0, height - t.shape[-2]), value=fill) for t in tensors]
    return torch.stack(padded), sizes
