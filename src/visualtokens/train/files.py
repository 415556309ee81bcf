"""Writing so that a reader, or the next start after a crash, sees the old or the new, never half."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError


class CannotSave(RuntimeError):
    """A file cannot be written; whatever was there before is as it was."""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, flush it to the disk, then rename it."""
    temporary = temporary_name(path)
    try:
        write(temporary)
        flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush_folder(path.parent)


def write_folder(path: Path, fill: Callable[[Path], object]) -> None:
    """Let ``fill`` write files into a temporary folder, flush them to the disk, then rename it to ``path``.

    ``path`` must not exist yet.
    """
    temporary = temporary_name(path)
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        for file in temporary.iterdir():
            flush(file)
        flush_folder(temporary)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    flush_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder; its name goes first, so that the rest after a crash is not taken for whole."""
    condemned = temporary_name(path)
    os.rename(path, condemned)
    shutil.rmtree(condemned)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files and folders of a process that was killed."""
    for left in folder.glob(".*.tmp"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def link(source: Path, target: Path) -> None:
    """Make ``target`` the same file as ``source`` without a copy where the file system can do that."""

    def fill(temporary: Path) -> None:
        try:
            os.link(source, temporary)
        except OSError:  # no hard links here, or no more of them for this file
            shutil.copyfile(source, temporary)

    write_atomically(target, fill)


def temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def flush(path: Path) -> None:
    """Have the content on the disk."""
    # Windows flushes only what is open for writing; a folder opens only for reading.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(path: Path) -> None:
    """Have the names in the folder on the disk."""
    if os.name == "posix":  # elsewhere a folder cannot be opened, and a rename needs no flush of its own
        flush(path)


@contextlib.contextmanager
def explain_failure(folder: Path, before: str) -> Iterator[None]:
    """Turn what the system, safetensors or torch say about a full or read-only disk into one line.

    ``before`` tells what is still there.
    """
    try:
        yield
    # torch reports a full disk as a RuntimeError, safetensors by its own kind.
    except (OSError, SafetensorError, RuntimeError) as error:
        free = _free_space(folder)
        reason = " ".join(str(error).split())[:200]
        raise CannotSave(f"cannot save in {str(folder)!r}{free}: {reason}; {before}") from error


def _free_space(folder: Path) -> str:
    try:
        return f" ({shutil.disk_usage(folder).free / 1e6:,.0f} MB free)"
    except OSError:
        return ""
