"""The files of a checkpoint, and writing that leaves the old version or the new one, never half of it.

A checkpoint is a folder with ``model.safetensors`` and ``config.json``, the layout of the Hugging Face Hub.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from visualtokens.errors import UserError

if TYPE_CHECKING:  # torch is imported where it is used: the help of the command line imports this module
    from torch import Tensor, nn

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar")


# Reading a checkpoint.

MAX_JSON = 16 * 2**20  # bytes; the names of 100,000 classes have about 2 MB
MAX_NESTING = 32  # of lists and objects within each other


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
    return read_json(folder / CONFIG)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of at most :data:`MAX_JSON` bytes."""
    document = read_json_value(path)
    if not isinstance(document, dict):
        raise UserError(f"{path} does not hold a JSON object")
    return document


def read_json_value(path: Path) -> Any:
    """Return the JSON value in a file of at most :data:`MAX_JSON` bytes."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_JSON + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error
    if len(content) > MAX_JSON:
        raise UserError(f"{path} is larger than {MAX_JSON >> 20} MB; a configuration has a few kilobytes")
    return parse_json(content, str(path))


def parse_json(content: str | bytes, name: str) -> Any:
    """Return the JSON value in a text; ``name`` stands for it in errors."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        document = json.loads(text, object_pairs_hook=_unique_names, parse_constant=_not_a_number)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not JSON: {one_line(error)}") from error
    if _nesting(document) > MAX_NESTING:
        raise UserError(f"{name} has more than {MAX_NESTING} lists and objects within each other")
    return document


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name!r} is in one object twice")
        values[name] = value
    return values


def _not_a_number(constant: str) -> None:
    raise ValueError(f"{constant} is not a number in JSON")


def _nesting(value: Any) -> int:
    """Return the number of lists and objects within each other."""
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        level = [x for each in level for x in (each.values() if isinstance(each, dict) else each)]
        depth += 1
    return depth


def _pickled(file: Path) -> UserError:
    return UserError(
        f"{str(file)!r} is a pickle, which is not loaded because it can run any code; convert its tensors "
        f"once: import visualtokens; visualtokens.convert({str(file)!r}, MODEL).save(FOLDER), where MODEL is "
        "the name of its timm model, or paca or stvit for a checkpoint released with these"
    )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of ``model.safetensors``."""
    return read_tensors(folder / WEIGHTS)


# What torch raises for a file that is damaged or not its own.
_DAMAGED: tuple[type[Exception], ...] = (
    *(OSError, RuntimeError, EOFError, struct.error, MemoryError, LookupError),
    *(TypeError, ValueError, AttributeError, AssertionError, ArithmeticError),
)


def read_tensors(path: Path) -> dict[str, Any]:
    """Return the content of a .safetensors file, or of a .pth file of tensors. Runs no pickled code."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    damaged: tuple[type[Exception], ...] = (SafetensorError, *_DAMAGED)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # the options of training scripts
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} holds more than tensors, and pickled code is never run; "
            "where the file was made, save the state dict alone: torch.save(model.state_dict(), FILE)"
        ) from error
    except damaged as error:
        raise UserError(f"{path} is damaged: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; give a file of a state dict")
    return content


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], file: Path, architecture: str) -> None:
    """Load all weights of the file into the model; they must be finite."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:  # names or shapes that the architecture does not have
        raise UserError(f"{file} does not fit {architecture!r}: {one_line(error)}") from error
    check_finite(model.state_dict(), file)


def check_finite(weights: Mapping[str, Tensor], source: object) -> None:
    """Raise :class:`UserError` for the first tensor that holds NaN or infinity."""
    import torch

    for name, weight in weights.items():
        if not weight.is_floating_point() or weight.is_meta or not weight.numel():
            continue
        values = weight.detach().float() if weight.dtype.itemsize == 1 else weight.detach()  # float8
        # 10x faster than values.isfinite().all(): 0.03 s for the 87 M weights of a ViT-B on one core
        if not torch.stack(values.aminmax()).isfinite().all():
            raise UserError(f"{source}: {name!r} is not finite; the training diverged or the file is damaged")


T = TypeVar("T")


def as_dataclass(kind: type[T], values: Any) -> T:
    """Return ``kind(**values)``; :class:`TypeError` if a value is not of the type that its field declares."""
    hints = get_type_hints(kind)
    made = kind(**values)
    for name, value in vars(made).items():
        if not _is_instance(value, hints[name]):
            raise TypeError(f"{name} is not {hints[name]}")
    return made


def _is_instance(value: Any, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is_instance(value, part) for part in parts)
    if hint is Any or origin is None:
        return hint is Any or (isinstance(value, hint) and (hint is bool or not isinstance(value, bool)))
    if not isinstance(value, origin):
        return False
    if origin is dict:
        return all(_is_instance(k, parts[0]) and _is_instance(v, parts[1]) for k, v in value.items())
    if origin is tuple:
        return len(value) == len(parts) and all(map(_is_instance, value, parts))
    return all(_is_instance(each, parts[0]) for each in value)


def one_line(error: Exception) -> str:
    """Return the first 200 characters of an error message on one line."""
    return " ".join(str(error).split())[:200]


# Writing a checkpoint.


def json_ready(value: Any) -> Any:
    """Return the value with None for numbers that are not finite, which JSON lacks, also nested ones."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: json_ready(item) for key, item in value.items()}
    return [json_ready(item) for item in value] if isinstance(value, (list, tuple)) else value


def write_weights(path: Path, weights: dict[str, Tensor]) -> None:
    """Write a safetensors file that everyone with access to the folder can read."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors restricts it to the owner


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def contiguous_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the weights on the CPU, each contiguous and in its own memory, for safetensors."""
    import torch

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
    """Delete the temporary files and folders that a killed process left in the folder, and nothing else."""
    for left in folder.glob(f"{_TEMPORARY}*.tmp"):
        if re.fullmatch(re.escape(_TEMPORARY) + r".+\.\d+\.tmp", left.name):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def link(source: Path, target: Path) -> None:
    """Replace ``target`` by a hard link to ``source``, or by a copy where links are not supported."""

    def fill(temporary: Path) -> None:
        try:
            os.link(source, temporary)
        except OSError:  # no hard links on this file system, or too many for this file
            shutil.copyfile(source, temporary)

    write_atomically(target, fill)


_TEMPORARY = ".vtok-"  # prefix of temporary names, such as .vtok-config.json.1234.tmp


def _temporary_name(path: Path) -> Path:
    return path.with_name(f"{_TEMPORARY}{path.name}.{os.getpid()}.tmp")


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
    from safetensors import SafetensorError

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
