"""Batches of images with objects."""

from __future__ import annotations

from dataclasses import dataclass

from visualtokens.data.detection import DetectionDataset
from visualtokens.data.detection_batch import DetectionBatch, DetectionItem, collate
from visualtokens.data.detection_sizes import Sizing, as_is
from visualtokens.data.epochs import Items, Loader, load_items
from visualtokens.data.order import Key
from visualtokens.data.randomness import generator
from visualtokens.data.share import Share


def create_detection_loader(
    dataset: DetectionDataset,
    *,
    batch: int,
    sizing: Sizing | None,
    seed: int = 0,
    workers: int = 0,
    share: Share | None = None,
    pin_memory: bool = False,
) -> Loader[DetectionBatch]:
    """A loader of :class:`DetectionBatch`.

    To train, images come shuffled and changed as ``sizing`` says, each by random numbers that depend on
    ``seed``, epoch and item only, with the objects that can be learned. To judge, ``sizing=None``: in
    order, unchanged, with all objects. An image that cannot be read, or whose annotation cannot be used,
    is listed in ``bad`` and not replaced.
    """
    return load_items(
        _Items(dataset, sizing, seed),
        collate,
        count=len(dataset),
        batch=batch,
        train=sizing is not None,
        seed=seed,
        workers=workers,
        share=share or Share(),
        pin_memory=pin_memory,
    )


@dataclass(frozen=True, eq=False)
class _Items(Items[DetectionItem]):
    dataset: DetectionDataset
    sizing: Sizing | None
    seed: int

    def make(self, key: Key) -> DetectionItem:
        image, objects = self.dataset[key.index]
        if self.sizing is None:
            return DetectionItem(*as_is(image, objects), key.index)
        rng = generator(self.seed, key.epoch, key.index)
        return DetectionItem(*self.sizing(image, objects, rng), key.index)
