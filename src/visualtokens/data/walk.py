"""Finding files: folders with the links in them, shares of a list, limits of tar shards. Needs no torch."""

from __future__ import annotations

import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from visualtokens.data.decode import EXTENSIONS
from visualtokens.errors import UserError

MAX_FILE_BYTES = 2**29  # of a file in a shard; 64 megapixels of 16-bit RGB take 384 MB
META_FILE = re.compile(r"__[^/]*__($|/)")  # webdataset's own files, such as __worker__.json
DAMAGE = (tarfile.TarError, OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)  # of an archive


@dataclass(frozen=True)
class Share:
    """Part number ``part`` of ``parts`` equal parts, such as the images that one process loads."""

    part: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.part < self.parts:
            raise UserError(f"part {self.part} of {self.parts} does not exist; parts count from 0")

    def of(self, count: int) -> NDArray[np.int64]:
        """Positions among ``count`` that belong to this part, ascending; part sizes differ by at most one.

        Mixup blends position i with position ``count - 1 - i``. If the count allows it, both fall into the
        same part, so that a batch is blended in the same way for any number of parts.
        """
        positions = np.arange(count)
        if count % (2 * self.parts) == 0:
            pair = np.minimum(positions, count - 1 - positions)
            return positions[pair % self.parts == self.part]
        return np.array_split(positions, self.parts)[self.part]


class Walk:
    """Lists folders below ``top``, with those that links lead to; folders with a leading dot are left out.

    Raises :class:`UserError` for a link that leads back to ``top``, above it, or to a folder that was already
    listed, for a broken link (unless it is named like an image, which is then reported as unreadable), and
    for a folder that cannot be listed.
    """

    def __init__(self, top: Path) -> None:
        self.top = str(top)
        real = Path(os.path.realpath(top))
        self._seen = {str(folder): self.top for folder in (real, *real.parents)}  # real path: path

    def __call__(self, start: str = "") -> Iterator[tuple[str, list[str]]]:
        """Each folder from ``top/start`` downwards, and the names of its files."""
        path = os.path.join(self.top, start) if start else self.top
        for parent, folders, files in os.walk(path, onerror=_fail, followlinks=True):
            if parent != self.top:
                self._visit(parent)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in files:
                check_link(os.path.join(parent, name))
            yield parent, files

    def _visit(self, folder: str) -> None:
        real = os.path.realpath(folder)
        other = self._seen.setdefault(real, folder)
        if other is not folder:
            link = self._link(folder) or self._link(other) or folder
            raise UserError(f"the link {link} leads to {real}, which is also listed as {other}; remove it")

    def _link(self, path: str) -> str | None:
        """The last link on the way from ``top`` to the path."""
        while len(path) > len(self.top):
            if os.path.islink(path):
                return path
            path = os.path.dirname(path)
        return None


def _fail(error: OSError) -> None:
    raise UserError(f"{error.filename} cannot be listed: {error.strerror}") from error


def check_link(path: str) -> None:
    """Raise for a broken link that may have been a folder of images."""
    name = os.path.basename(path)
    if is_image(name) or name.startswith("."):
        return
    if os.path.islink(path) and not os.path.exists(path):
        raise UserError(f"the link {path} leads to {os.readlink(path)}, which does not exist; remove it")


def is_image(name: str) -> bool:
    """Whether a file is an image by its extension."""
    return os.path.splitext(name)[1].lower() in EXTENSIONS
