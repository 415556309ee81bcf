"""What a loader hands out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from visualtokens.data.decode import BadImage
from visualtokens.data.share import Share


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
