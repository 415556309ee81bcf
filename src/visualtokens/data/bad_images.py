"""Keeping count of the images that cannot be read."""

from __future__ import annotations

from visualtokens.data.decode import BadImage
from visualtokens.data.loader import Batch
from visualtokens.errors import UserError

_SHOWN = 3


class BadImages:
    """Collects ``Batch.bad`` over a run and stops it once too much of the dataset is missing.

    >>> bad = BadImages(len(dataset))
    >>> for batch in loader:
    ...     bad.add(batch)   # UserError once more than 5 % of the images turned out unreadable
    """

    def __init__(self, total: int, *, share: float = 0.05) -> None:
        if total < 1:
            raise UserError(f"total={total} is not the number of images of a dataset")
        if not 0 <= share <= 1:
            raise UserError(f"share={share} is not between 0 and 1")
        self.total = total
        self.share = share
        self._by_path: dict[str, BadImage] = {}

    def __len__(self) -> int:
        return len(self._by_path)

    @property
    def images(self) -> tuple[BadImage, ...]:
        """Each unreadable image once, in the order they were met."""
        return tuple(self._by_path.values())

    def add(self, batch: Batch) -> None:
        for bad in batch.bad:
            self._by_path.setdefault(bad.path, bad)
        if len(self) / self.total > self.share:
            raise self._error()

    def _error(self) -> UserError:
        first = "; ".join(f"{bad.path} ({bad.reason})" for bad in self.images[:_SHOWN])
        return UserError(
            f"{len(self)} of {self.total} images cannot be read, more than the {self.share:.1%} allowed: "
            f"{first}{'; …' if len(self) > _SHOWN else ''}. Repair or remove them, or allow a larger share"
        )
