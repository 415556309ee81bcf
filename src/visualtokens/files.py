"""The files of a checkpoint, and writing that leaves the old version or the new one, never half of it.

A checkpoint is a folder with ``model.safetensors`` and ``config.json``, the layout of the Hugging Face Hub.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from visualtokens.errors import UserError

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar")


# Reading a checkpoint.


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of ``config.json``; a :class:`UserError` states what the folder lacks."""
    expected = f"a checkpoint is a folder with {WEIGHTS} and {CONFIG}, as `vtok train --out` writes it"
    if folder.is_file():
        if folder.suffix in PICKLED:
            raise _pickled(folder)
        raise UserError(f"checkpoint {str(folder)!r} is a file; {expected}")
    if not folder.is_dir():
        raise UserError(f"checkpoint {str(folder)!r} does not exist; {expected}")
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            pickled = next((file for file in sorted(folder.iterdir()) if file.suffix in PICKLED), None)
            if name == WEIGHTS and pickled:
                raise _pickled(pickled)
            raise UserError(f"checkpoint {str(folder)!r} has no {name}; {expected}")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{folder / CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{folder / CONFIG} does not hold a JSON object")
    return config


def _pickled(file: Path) -> UserError:
    return UserError(
        f"{str(file)!r} is a pickle, which is not loaded because it can run any code; convert it once: "
        "import timm, visualtokens; model = timm.create_model(NAME, num_classes=COUNT, "
        f"checkpoint_path={str(file)!r}); timm.models.save_for_hf(model, FOLDER, safe_serialization=True)"
    )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of ``model.safetensors``."""
    try:
        return load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise UserError(f"{folder / WEIGHTS} is damaged: {error}") from error


def load_weights(model: nn.Module, folder: Path, architecture: str) -> None:
    """Load all weights of the folder into the model."""
    try:
        model.load_state_dict(read_weights(folder))
    except RuntimeError as error:  # names or shapes that the architecture does not have
        raise UserError(f"{folder / WEIGHTS} does not fit {architecture!r}: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """Return the first 200 characters of an error message on one line."""
    return " ".join(str(error).split())[:200]


# Writing a checkpoint.


def write_weights(path: Path, weights: dict[str, Tensor]) -> None:
    """Write a safetensors file that everyone with access to the folder can read."""
    path.touch()
    mode = path.stat().st_mode
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors restricts it to the owner


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def contiguous_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the weights on the CPU, each contiguous and in its own memory, for safetensors."""
    weights = model.state_dict().items()
    return {name: w.detach().cpu().clone(memory_format=torch.contiguous_format) for name, w in weights}


# Atomic writes.


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, flush it to disk, then rename it to ``path``."""
    temporary = _temporary_name(path)
    try:
        write(temporary)
        _flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _flush_folder(path.parent)


def write_folder(path: Path, fill: Callable[[Path], object]) -> None:
    """Let ``fill`` write files into a temporary folder, flush them to disk, then rename it to ``path``.

    ``path`` must not exist yet.
    """
    temporary = _temporary_name(path)
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        for file in temporary.iterdir():
            _flush(file)
        _flush_folder(temporary)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _flush_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder; renamed first, so that a crash leaves no partial folder under its name."""
    condemned = _temporary_name(path)
    os.rename(path, condemned)
    shutil.rmtree(condemned)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files and folders of a killed process."""
    for left in folder.glob(".*.tmp"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def link(source: Path, target: Path) -> None:
    """Replace ``target`` by a hard link to ``source``, or by a copy where links are not supported."""

    def fill(temporary: Path) -> None:
        try:
            os.link(source, temporary)
        except OSError:  # no hard links on this file system, or too many for this file
            shutil.copyfile(source, temporary)

    write_atomically(target, fill)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _flush(path: Path) -> None:
    # Windows flushes only files open for writing; a folder opens only for reading.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_folder(path: Path) -> None:
    """Flush the directory entries, which a rename changes."""
    if os.name == "posix":  # elsewhere a folder cannot be opened, and a rename needs no flush
        _flush(path)


# Failures.


class CannotSave(RuntimeError):
    """A file cannot be written; the previous version of it is intact."""


@contextlib.contextmanager
def saving(folder: Path, fallback: str) -> Iterator[None]:
    """Turn the errors of a full or read-only disk into a one-line :class:`CannotSave`.

    ``fallback`` states what is still intact.
    """
    try:
        yield
    # torch reports a full disk as RuntimeError, safetensors as SafetensorError.
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CannotSave(
            f"cannot save in {str(folder)!r}{_free_space(folder)}: {one_line(error)}; {fallback}"
        ) from error


def _free_space(folder: Path) -> str:
    try:
        return f" ({shutil.disk_usage(folder).free / 1e6:,.0f} MB free)"
    except OSError:
        return ""
