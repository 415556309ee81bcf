"""Dividing a list among several workers of the same kind: processes, or the pieces of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from visualtokens.errors import UserError


@dataclass(frozen=True)
class Share:
    """Part number ``part`` of ``parts``."""

    part: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.part < self.parts:
            raise UserError(f"part {self.part} of {self.parts} does not exist; parts count from 0")

    def of(self, count: int) -> NDArray[np.int64]:
        """Which of ``count`` places are in this part, in order; the parts differ by one place at most.

        Mixup blends place i with place i of the list turned round. If the count allows it, both always
        fall into the same part, so that a batch is blended alike however many parts it has.
        """
        places = np.arange(count)
        if count % (2 * self.parts) == 0:
            pair = np.minimum(places, count - 1 - places)
            return places[pair % self.parts == self.part]
        return np.array_split(places, self.parts)[self.part]
