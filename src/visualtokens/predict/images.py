"""The images to predict: files, folders, patterns, lists of names, and the members of tar shards."""

from __future__ import annotations

import glob
import io
import logging
import os
import tarfile
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visualtokens.data.decode import EXTENSIONS, BadImage, decode_image, read_image
from visualtokens.data.walk import DAMAGE, MAX_FILE_BYTES, META_FILE, Walk
from visualtokens.errors import UserError
from visualtokens.files import one_line
from visualtokens.progress import count

logger = logging.getLogger(__name__)

LIST = "-"  # the input that stands for a list of names
SHARDS = "wds:"
MAX_NAME = 4096  # bytes of a name in a list; Linux opens no longer path
CHUNK = 2**20


class Names:
    """Names of images in one block of memory: the bytes of each and eight more."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._ends = array("q")

    def append(self, name: str) -> None:
        self._text += name.encode("utf-8", "surrogatepass")
        self._ends.append(len(self._text))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = self._ends[index - 1] if index else 0
        return self._text[start : self._ends[index]].decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))


class Lookup:
    """The positions of names, by their hashes: 16 bytes for each."""

    def __init__(self, names: Names) -> None:
        self._names = names
        hashes = np.fromiter(map(hash, names), np.int64, len(names))
        self._order = hashes.argsort(kind="stable")
        self._hashes = hashes[self._order]

    def find(self, name: str) -> int:
        """Return the first position of the name, -1 if there is none."""
        at = int(self._hashes.searchsorted(hash(name)))
        while at < len(self._hashes) and self._hashes[at] == hash(name):
            if self._names[position := int(self._order[at])] == name:
                return position
            at += 1
        return -1

    def repeated(self) -> NDArray[np.bool_]:
        """Return which positions hold a name that is also at an earlier position: ``(names,)``."""
        found = np.zeros(len(self._names), np.bool_)
        for at in np.flatnonzero(self._hashes[1:] == self._hashes[:-1]) + 1:
            position = int(self._order[at])
            found[position] = self.find(self._names[position]) != position
        return found


class Images(Names):
    """The names of images in order; :meth:`read` decodes one. A member of a shard is ``<shard>/<member>``."""

    def __init__(self) -> None:
        super().__init__()
        self._shards: list[_Shard] = []

    def read(self, index: int) -> Image.Image:
        """Return the image, upright and in RGB; :class:`BadImage` if it cannot be read."""
        before = bisect_right(self._shards, index, key=lambda shard: shard.first)
        if before and index < self._shards[before - 1].end:
            return self._shards[before - 1].read(index, self[index])
        return read_image(self[index])

    def add_shard(self, path: str) -> int:
        """Add the images of an uncompressed tar file; return the number of its other files.

        What follows damage cannot be listed: the shard itself is then the last of its images, and unreadable.
        """
        shard = _Shard(path, first=len(self))
        others = 0
        try:
            for name, offset, size in _members(path):
                if not is_image(name):
                    others += not META_FILE.match(name)
                    continue
                self.append(f"{path}/{name}")
                shard.offsets.append(offset)
                shard.sizes.append(size)
        except DAMAGE as error:
            shard.damage = f"damaged after {len(shard.sizes)} of its images: {one_line(error)}"
            self.append(path)
        self._shards.append(shard)
        return others


class _Shard:
    """Where the images of one tar file are."""

    def __init__(self, path: str, *, first: int) -> None:
        self.path, self.first = path, first  # the position of its first image
        self.offsets, self.sizes = array("q"), array("q")
        self.damage = ""

    @property
    def end(self) -> int:
        return self.first + len(self.sizes) + bool(self.damage)

    def read(self, index: int, name: str) -> Image.Image:
        at = index - self.first
        if at == len(self.sizes):
            raise BadImage(name, self.damage)
        size = self.sizes[at]
        if size > MAX_FILE_BYTES:
            raise BadImage(name, f"too large: {size:,} bytes; a file may have {MAX_FILE_BYTES:,}")
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offsets[at])
                content = file.read(size)
        except OSError as error:
            raise BadImage(name, f"cannot be read: {error.strerror}") from error
        return decode_image(io.BytesIO(content), name)


def _members(path: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name, place and size of every file of an uncompressed tar file; one of ``DAMAGE`` at its end.

    ``tarfile`` stops at a header that it cannot read as if the archive ended there.
    """
    with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
        end = 0
        while (member := tar.next()) is not None:
            if member.size < 0 or tar.offset <= end:
                raise tarfile.ReadError("a header with a negative size")
            end = tar.offset
            if member.isreg():
                yield member.name, member.offset_data, member.size
            tar.members = []  # type: ignore[attr-defined]  # it would keep all of them
        file.seek(tar.offset)
        block = file.read(tarfile.BLOCKSIZE)
        if len(block) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError("it ends without the mark of its end")
        if any(block):
            raise tarfile.ReadError("a damaged header")


def is_image(name: str) -> bool:
    """Return whether a file is an image by its extension, and not hidden."""
    base = os.path.basename(name)
    return not base.startswith(".") and os.path.splitext(base)[1].lower() in EXTENSIONS


def find_images(
    inputs: Sequence[str], *, listed: BinaryIO | None = None, skip: str | Path | None = None
) -> Images:
    """Return the images that ``inputs`` name, in this order.

    An input is a file, a folder (its images and those below it, sorted by path), a pattern such as
    ``photos/**/*.jpg``, ``wds:PATH`` (a folder of .tar shards, or one of them), or ``-`` (the names in
    ``listed``, see :func:`read_list`). In folders, patterns and shards, images are recognised by their
    extension and hidden ones are left out; links are followed as by :class:`Walk`. ``skip`` is a folder that
    is not searched. A file that is named or listed is an image, whatever its extension. A pattern that
    matches nothing is the name of a file, as in a shell, unless there is nothing else.
    """
    images, ignored, unmatched = Images(), 0, 0
    for given in inputs:
        before = len(images)
        if given == LIST:
            if listed is None:
                raise UserError(f"{LIST!r} stands for a list of names, and there is none to read")
            for name in read_list(listed):
                images.append(name)
        elif given.startswith(SHARDS):
            ignored += sum(map(images.add_shard, _shards(given.removeprefix(SHARDS))))
        elif os.path.isdir(given):
            ignored += _add(images, _files_below(given, skip))
        elif os.path.lexists(given) or not glob.has_magic(given):
            images.append(given)
        else:
            others = _add(images, filter(os.path.isfile, glob.iglob(given, recursive=True)))
            if len(images) == before and not others:
                images.append(given)
                unmatched += 1
            ignored += others
        if len(images) == before:
            logger.warning("%s", _nothing(given))
    if ignored:
        logger.info("ignored %s without the extension of an image", count(ignored, "file"))
    if len(images) == unmatched:
        raise UserError(f"no images to predict: {'; '.join(map(_nothing, inputs))}")
    return images


def _nothing(given: str) -> str:
    known = " ".join(sorted(EXTENSIONS))
    if given == LIST:
        return "standard input lists no files"
    if os.path.isdir(given) or given.startswith(SHARDS):
        return f"{given!r} holds none ({known})"
    return f"{given!r} matches none ({known})"


def _add(images: Images, files: Iterable[str]) -> int:
    """Add the images among the files, sorted; return the number of the others."""
    found, others = [], 0
    for file in files:
        if is_image(file):
            found.append(file)
        else:
            others += not os.path.basename(file).startswith(".")
    found.sort(reverse=True)
    while found:  # moved one by one, so that the names are in memory once
        images.append(found.pop())
    return others


def _files_below(folder: str, skip: str | Path | None) -> Iterator[str]:
    left_out = None if skip is None else os.path.realpath(skip)
    for parent, files in Walk(Path(folder))():
        if left_out is not None and Path(os.path.realpath(parent)).is_relative_to(left_out):
            continue
        for name in files:
            yield os.path.join(parent, name)


def _shards(path: str) -> Sequence[str]:
    """Return the tar files of a folder, sorted, or the file itself."""
    root = os.path.expanduser(path)
    if os.path.isdir(root):
        names = (name for name in sorted(os.listdir(root)) if not name.startswith("."))
        found = [os.path.join(root, name) for name in names if name.endswith(".tar")]
    else:
        found = [root]
    for shard in found:
        if not os.path.isfile(shard):  # opening a named pipe would block
            raise UserError(f"{shard!r} is not a tar file; give wds:FOLDER or wds:FILE.tar on a local disk")
        if not _is_tar(shard):
            raise UserError(f"{shard!r} is not an uncompressed tar file; unpack or repack it")
    return found


def _is_tar(path: str) -> bool:
    """Return whether a file starts as an uncompressed tar file does."""
    try:
        with tarfile.open(path, "r:"):
            return True
    except DAMAGE:
        return False


def read_list(stream: BinaryIO) -> Iterator[str]:
    """Yield the names of a list: one per line, or each followed by a NUL byte as ``find -print0`` writes."""
    rest = stream.read(MAX_NAME + 1)
    separator = b"\0" if b"\0" in rest else b"\n"
    while chunk := stream.read(CHUNK):
        *names, rest = (rest + chunk).split(separator)
        yield from _decoded(names, separator)
        if len(rest) > MAX_NAME:
            break
    yield from _decoded(rest.split(separator), separator)


def _decoded(names: Iterable[bytes], separator: bytes) -> Iterator[str]:
    for name in names:
        if len(name) > MAX_NAME:
            raise UserError(
                f"the list holds a name of more than {MAX_NAME:,} bytes; give one path per line, "
                "or paths that end with a NUL byte"
            )
        if separator == b"\n":
            name = name.removesuffix(b"\r")
        if name:
            yield os.fsdecode(name)
