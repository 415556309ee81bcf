"""A file of results that one or several processes write together, and that survives their end at any moment.

While images are predicted, every process appends one line for each to its own part, a file in
``<file>.parts/``. The last process to end merges all parts into the file, in the order of the images, and
removes them if no image is missing; those of a format that cannot be read back stay. ``<file>.run.json``
holds the settings that the results depend on, and is locked by every process.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from visualtokens.data.walk import Share
from visualtokens.errors import UserError
from visualtokens.files import remove_folder, write_atomically
from visualtokens.predict.formats import Format, Record, parse_line, to_line
from visualtokens.predict.images import Images, Lookup, Names

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

PARTS, RUN = ".parts", ".run.json"
PART = re.compile(r"(\d{5,})-of-(\d{5,})\.jsonl")
BEFORE = "before.jsonl"  # what the file held before a merge
MAX_LINE = 2**26  # bytes; the line of an image with 100,000 classes has about 5 MB
MAX_RUN = 2**20  # bytes of the settings
ATTEMPTS, PAUSE = 20, 0.05  # to read settings that another process writes; seconds between two
UNSUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True)
class Merged:
    """What the file holds after a merge."""

    images: int  # of the inputs, unreadable ones included
    unreadable: int
    missing: int  # images of the inputs without a result
    new: bool  # whether the file has changed


class Results:
    """The part of one process of a result file; use it as a context manager.

    ``todo`` are the positions of the images that this process has to predict, ``done`` is the number of those
    in its share that it need not. Every image has one result, however often the inputs name it. Unreadable
    images are tried again.
    """

    def __init__(
        self,
        path: str | Path,
        format: Format,
        images: Images,
        *,
        settings: Mapping[str, Any],
        share: Share | None = None,
        overwrite: bool = False,
    ) -> None:
        self.path, self.format, self.images, self.share = Path(path), format, images, share or Share()
        self.parts = self.path.with_name(self.path.name + PARTS)
        self._lookup = Lookup(images)
        self._repeated = self._lookup.repeated()
        self._settings = dict(settings)
        self._added = False
        with contextlib.ExitStack() as stack:
            self._lock = self._open_run(stack, overwrite=overwrite)
            self._part = self._open_part(stack)
            own = np.arange(self.share.part, len(images), self.share.parts)
            own = own[~self._repeated[own]]
            self.todo = own[~self._finished()[own]]
            self.done = len(own) - len(self.todo)
            self._stack = stack.pop_all()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, record: Record) -> None:
        """Write the record of one image, at once."""
        self._added = True
        self._part.write(to_line(record))
        self._part.flush()

    def finish(self) -> Merged | None:
        """Merge all parts if no other process has a part open; return what the file holds then, else None."""
        self._part.close()
        if not _lock(self._lock, exclusive=True, wait=False):
            return None
        return self._merge()

    # Opening.

    def _open_run(self, stack: contextlib.ExitStack, *, overwrite: bool) -> int:
        """Open and lock the file of the settings; write it, or compare the settings with those it holds."""
        run = self.path.with_name(self.path.name + RUN)
        if self.path.is_dir():
            raise UserError(f"{str(self.path)!r} is a folder; give the name of a file")
        if self.path.exists() and not run.exists() and not overwrite:
            raise UserError(f"{str(self.path)!r} exists; save elsewhere or replace it with --overwrite")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not run.exists()
        descriptor = os.open(run, os.O_RDWR | os.O_CREAT, 0o666)
        stack.callback(os.close, descriptor)
        if overwrite:
            if not _lock(descriptor, exclusive=True, wait=False):
                raise self._in_use()
            self.path.unlink(missing_ok=True)
            if self.parts.is_dir():
                remove_folder(self.parts)
        for attempt in itertools.count(1):
            _lock(descriptor, exclusive=False)  # waits for a merge
            before = _read(descriptor)
            difference = self._difference(run, before)
            if difference is None:
                break
            if (before or not is_new) and self._has_results():
                if before or attempt == ATTEMPTS:
                    raise difference
            elif _lock(descriptor, exclusive=True, wait=False):
                if _read(descriptor) == before:
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, json.dumps(self._settings, indent=2).encode() + b"\n")
                    os.fsync(descriptor)  # before there are any results
                continue
            elif before:
                raise difference
            # An empty file may be one that another process has just created.
            _unlock(descriptor)
            time.sleep(PAUSE)
        return descriptor

    def _has_results(self) -> bool:
        parts = self._part_files() if self.parts.is_dir() else []
        return self.path.exists() or any(path.stat().st_size for path, _ in parts)

    def _difference(self, run: Path, text: bytes) -> UserError | None:
        """Return the error for a file that holds other settings, None if they are the same."""
        try:
            before = json.loads(text)
            items = dict(before).items()
        except (ValueError, TypeError, RecursionError):
            return UserError(
                f"{str(run)!r} is {'damaged' if text else 'empty'}, so the options of {str(self.path)!r} are "
                "unknown; save elsewhere, or start again with --overwrite"
            )
        now = json.loads(json.dumps(self._settings))
        if before == now:
            return None
        old = {name: value for name, value in items if now.get(name) != value}
        new = {name: value for name, value in now.items() if before.get(name) != value}
        return UserError(
            f"{str(self.path)!r} was made with {_brief(old)} instead of {_brief(new)}; "
            "give the same options, save elsewhere, or start again with --overwrite"
        )

    def _open_part(self, stack: contextlib.ExitStack) -> BinaryIO:
        """Open and lock the part of this process, without the torn line at its end."""
        self.parts.mkdir(exist_ok=True)
        part, parts = self.share.part, self.share.parts
        path = self.parts / f"{part:05d}-of-{parts:05d}.jsonl"
        file = stack.enter_context(path.open("ab+"))
        for other, (i, count) in self._part_files():
            if other == path or (i - part) % math.gcd(count, parts):
                continue  # another share of the images
            with other.open("rb") as opened:
                if not _lock(opened.fileno(), exclusive=False, wait=False):  # others may check it too
                    raise self._in_use()
        if not _lock(file.fileno(), exclusive=True, wait=False):
            raise self._in_use()
        file.truncate(_whole_lines(file))
        return file

    def _in_use(self) -> UserError:
        return UserError(
            f"{str(self.path)!r} is in use: another process predicts the same images; "
            "wait until it ends, stop it, or save elsewhere"
        )

    def _part_files(self) -> list[tuple[Path, tuple[int, int]]]:
        """Return the parts, sorted by name, with their shares."""
        names = sorted(os.listdir(self.parts))
        found = ((name, PART.fullmatch(name)) for name in names)
        return [(self.parts / name, (int(match[1]), int(match[2]))) for name, match in found if match]

    def _can_read(self) -> bool:
        """Return whether the file holds results that may be in no part."""
        return self.format.readable and self.path.exists()

    def _finished(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return which images have a prediction: ``(images,)``."""
        done = np.zeros(len(self.images), np.bool_)
        before = self.format.read(self.path) if self._can_read() else ()
        lines = (record for path, _ in self._part_files() for _, record in _scan(path))
        for records in (before, lines):
            for record in records:
                if "error" not in record and (position := self._lookup.find(record["image"])) >= 0:
                    done[position] = True
        return done

    # Merging.

    def _merge(self) -> Merged:
        sources = [path for path, _ in self._part_files()]
        is_new = any(path.stat().st_size for path in sources)
        is_new &= self._added or self.format.readable or not self.path.exists()
        before = self.parts / BEFORE
        if self._can_read():
            records = map(to_line, self.format.read(self.path))
            write_atomically(before, lambda temporary: _write_lines(temporary, records))
            sources.insert(0, before)
        others = Names()  # images that the inputs no longer name
        places = _locate(sources, self.images, self._lookup, others)
        if is_new:
            self._remove_leftovers()
            kept = _locate(sources, others, Lookup(others))
            with contextlib.ExitStack() as stack:
                files = [stack.enter_context(path.open("rb")) for path in sources]
                lines = (line for each in (kept, places) for line in each.lines(files))
                write_atomically(self.path, lambda temporary: self.format.write(temporary, lines))
        missing = int((places.source[~self._repeated] < 0).sum())
        if missing or not self.format.readable:
            before.unlink(missing_ok=True)
        else:
            remove_folder(self.parts)
        return Merged(
            images=int((places.source >= 0).sum()),
            unreadable=int(((places.source >= 0) & ~places.good).sum()),
            missing=missing,
            new=is_new,
        )

    def _remove_leftovers(self) -> None:
        """Remove the temporary files of merges that were killed."""
        pattern = re.compile(rf"\.vtok-{re.escape(self.path.name)}\.\d+\.tmp")
        for name in filter(pattern.fullmatch, os.listdir(self.path.parent)):
            self.path.with_name(name).unlink(missing_ok=True)


class _Places:
    """Where the record of every image is."""

    def __init__(self, count: int) -> None:
        self.source = np.full(count, -1, np.int32)  # number of the file; -1: none
        self.offset = np.zeros(count, np.int64)
        self.good = np.zeros(count, np.bool_)  # not an error

    def lines(self, files: Sequence[BinaryIO]) -> Iterator[bytes]:
        """Yield the lines of all records in the order of the images."""
        for source, offset in zip(self.source, self.offset, strict=True):
            if source >= 0:
                file = files[int(source)]
                file.seek(int(offset))
                yield file.readline()


def _locate(sources: Iterable[Path], names: Names, lookup: Lookup, others: Names | None = None) -> _Places:
    """Return where the records of the names are; add other names to ``others``.

    Of several records of an image, the last prediction counts, or else the last error.
    """
    places = _Places(len(names))
    for number, source in enumerate(sources):
        for offset, record in _scan(source):
            position = lookup.find(record["image"])
            good = "error" not in record
            if position < 0:
                if others is not None:
                    others.append(record["image"])
            elif good or not places.good[position]:
                places.source[position], places.offset[position] = number, offset
                places.good[position] = good
    return places


def _scan(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield the offset and the record of every line, without damaged ones and a torn one at the end."""
    with path.open("rb") as file:
        offset = 0
        while (line := file.readline(MAX_LINE)).endswith(b"\n"):
            with contextlib.suppress(ValueError):
                yield offset, parse_line(line)
            offset += len(line)


def _whole_lines(file: BinaryIO) -> int:
    """Return the size of a file without a torn line at its end."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 2**16)
        file.seek(start)
        if (newline := file.read(end - start).rfind(b"\n")) >= 0:
            return start + newline + 1
        end = start
    return 0


def _read(descriptor: int) -> bytes:
    """Return the start of an open file, and leave its position there."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    text = os.read(descriptor, MAX_RUN)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return text


def _write_lines(path: Path, lines: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(lines)


def _brief(settings: Mapping[str, Any]) -> str:
    texts = (f"{name}={value}" for name, value in settings.items())
    return ", ".join(text if len(text) <= 60 else text[:59] + "…" for text in texts) or "fewer options"


def _lock(descriptor: int, *, exclusive: bool, wait: bool = True) -> bool:
    """Lock an open file, or replace the lock that it has; return whether that was possible.

    The kernel releases a lock when its process ends, also by SIGKILL. Where locks are not supported, a
    warning says so.
    """
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, "this system has no flock")
        mode = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        fcntl.flock(descriptor, mode if wait else mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        logger.warning("cannot lock the results (%s); start no second process for the same images", error)
    return True


def _unlock(descriptor: int) -> None:
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
