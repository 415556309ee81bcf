"""What a loader of detection images hands out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from visualtokens.data.decode import BadImage
from visualtokens.data.detection import Objects
from visualtokens.data.share import Share
from visualtokens.data.workers import share_from_worker


@dataclass(frozen=True, eq=False)
class DetectionItem:
    """One image on its way into a batch."""

    image: Tensor
    objects: Objects
    index: int


@dataclass(frozen=True, eq=False)
class DetectionBatch:
    """The readable images of a batch, possibly none, each of its own size, and what was wrong with others."""

    images: tuple[Tensor, ...]  # (3, H, W) uint8
    objects: tuple[Objects, ...]
    index: Tensor  # (B,) int64: the item of the dataset
    bad: tuple[BadImage, ...]

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device, *, memory_format: torch.memory_format) -> DetectionBatch:
        """Images, boxes, labels and masks on the device; the detector decides the order of its own batch."""
        return replace(
            self,
            images=tuple(image.to(device, non_blocking=True) for image in self.images),
            objects=tuple(each.to(device) for each in self.objects),
        )

    def split(self, parts: int) -> list[DetectionBatch]:
        """Divide the images into several batches; the first one takes ``bad`` along."""
        if parts == 1:
            return [self]
        pieces = []
        for part in range(parts):
            places = Share(part, parts).of(len(self)).tolist()
            pieces.append(
                DetectionBatch(
                    tuple(self.images[i] for i in places),
                    tuple(self.objects[i] for i in places),
                    self.index[places],
                    () if part else self.bad,
                )
            )
        return pieces

    def pin_memory(self) -> DetectionBatch:
        """In memory from which a GPU copies without waiting; ``DataLoader`` asks for it."""
        return replace(self, images=tuple(image.pin_memory() for image in self.images))


def collate(items: list[DetectionItem | BadImage]) -> DetectionBatch:
    """Makes one batch of items and of what could not be read."""
    good = [item for item in items if isinstance(item, DetectionItem)]
    batch = DetectionBatch(
        tuple(item.image for item in good),
        tuple(item.objects for item in good),
        torch.tensor([item.index for item in good], dtype=torch.int64),
        tuple(item for item in items if isinstance(item, BadImage)),
    )
    share_from_worker((*batch.images, *(t for each in batch.objects for t in each.tensors()), batch.index))
    return batch
