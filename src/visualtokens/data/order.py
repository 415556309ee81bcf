"""In which order the items of a dataset are loaded, and which of them one process takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Sampler

from visualtokens.data.randomness import generator
from visualtokens.data.share import Share


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
