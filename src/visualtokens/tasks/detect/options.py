"""What a detector is built with, besides its backbone."""

from __future__ import annotations

from dataclasses import dataclass, fields

from visualtokens.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DetectorOptions:
    """The defaults are those that COCO is trained with everywhere; smaller ones suit smaller images."""

    classes: int
    short: int = 800  # side of the images that it sees, unless the long one would exceed ``long``
    long: int = 1333
    width: int = 256  # channels of the pyramid and of the heads' convolutions
    hidden: int = 1024  # of the box head
    regions: int = 512  # to learn from, per image; four times as many are proposed

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise UserError(f"{field.name}={getattr(self, field.name)} must be at least 1")
        if self.long < self.short:
            raise UserError(f"long={self.long} is less than short={self.short}")
