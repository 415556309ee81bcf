"""A trained model as a folder: ``model.safetensors`` and ``config.json``, the layout of the Hugging Face Hub.

``timm.create_model("local-dir:<folder>", pretrained=True)`` loads it, after ``import visualtokens``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from visualtokens.data import Preprocess
from visualtokens.errors import UserError
from visualtokens.tasks.classify import FIRST_WEIGHTS, build_model, describe_classifier, preprocess_for

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar")


@dataclass(frozen=True)
class Checkpoint:
    """A model ready to use: in eval mode, with the names of its classes and its preprocessing."""

    model: nn.Module
    classes: list[str]
    preprocess: Preprocess
    config: dict[str, Any]  # what config.json holds


def save_checkpoint(
    out: str | Path,
    model: nn.Module,
    *,
    classes: Sequence[str],
    preprocess: Preprocess,
    model_args: Mapping[str, Any],
    training: Mapping[str, Any],
) -> None:
    """Write the folder; each file is replaced as a whole.

    ``model_args`` are those the model was built with, ``training`` the options of the run. Where its first
    weights came from (``init_from``) is no part of the model: it is kept with the options of the run only.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    config = describe_classifier(model, classes=classes, preprocess=preprocess, model_args=model_args)
    weights = plain_weights(model)
    write_atomically(folder / WEIGHTS, lambda path: write_weights(path, weights))
    write_atomically(folder / CONFIG, lambda path: write_config(path, config | {"training": dict(training)}))


def write_weights(path: Path, weights: dict[str, Tensor]) -> None:
    path.touch()
    mode = path.stat().st_mode
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors lets nobody but the owner read


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights on the CPU, each contiguous and in memory of its own, as safetensors wants them."""
    weights = model.state_dict().items()
    return {name: w.detach().cpu().clone(memory_format=torch.contiguous_format) for name, w in weights}


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read what :func:`save_checkpoint`, or timm's ``save_for_hf``, wrote. Runs no pickled code."""
    folder = Path(path)
    config = read_config(folder)
    require_task(folder, config, "classify")
    architecture, count = config.get("architecture"), config.get("num_classes")
    if not isinstance(architecture, str) or not isinstance(count, int):
        raise UserError(f"{folder / CONFIG} does not name an 'architecture' and its 'num_classes'")
    if FIRST_WEIGHTS in config.get("model_args", {}):
        raise UserError(f"{folder / CONFIG}: model_args may not hold {FIRST_WEIGHTS!r}; leave it out")
    model = build_model(
        architecture,
        classes=count,
        model_args=config.get("model_args", {}),
        cfg=config.get("pretrained_cfg", {}),
    )
    load_weights(model, folder, architecture)
    classes = [str(name) for name in config.get("label_names", range(count))]
    if len(classes) != count:
        raise UserError(f"{folder / CONFIG} names {len(classes)} classes for a model of {count}")
    return Checkpoint(model.eval(), classes, preprocess_for(model), config)


def require_task(folder: Path, config: Mapping[str, Any], task: str) -> None:
    """:class:`UserError` if the checkpoint is one of another task."""
    trained = config.get("task", "classify")
    if trained != task:
        raise UserError(f"{folder} was trained to {trained}, not to {task}; give another checkpoint")


def load_weights(model: nn.Module, folder: Path, architecture: str) -> None:
    """Give the model all the weights of the folder."""
    try:
        model.load_state_dict(read_weights(folder))
    except RuntimeError as error:  # names or shapes that the architecture does not have
        raise UserError(f"{folder / WEIGHTS} does not fit {architecture!r}: {_one_line(error)}") from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of ``model.safetensors``."""
    try:
        return load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise UserError(f"{folder / WEIGHTS} is damaged: {error}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """What ``config.json`` of a checkpoint holds, or an error that says what the folder lacks."""
    wanted = f"a checkpoint is a folder with {WEIGHTS} and {CONFIG}, as `vtok train --out` writes it"
    if folder.is_file():
        if folder.suffix in PICKLED:
            raise _pickled(folder)
        raise UserError(f"checkpoint {str(folder)!r} is a file; {wanted}")
    if not folder.is_dir():
        raise UserError(f"checkpoint {str(folder)!r} does not exist; {wanted}")
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            pickled = next((file for file in sorted(folder.iterdir()) if file.suffix in PICKLED), None)
            if name == WEIGHTS and pickled:
                raise _pickled(pickled)
            raise UserError(f"checkpoint {str(folder)!r} has no {name}; {wanted}")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{folder / CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{folder / CONFIG} does not hold a JSON object")
    return config


def _pickled(file: Path) -> UserError:
    return UserError(
        f"{str(file)!r} is pickled, and pickled ones are not loaded because they can run any code; convert "
        "it once: import timm, visualtokens; model = timm.create_model(NAME, num_classes=COUNT, "
        f"checkpoint_path={str(file)!r}); timm.models.save_for_hf(model, FOLDER, safe_serialization=True)"
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


# Writing so that a reader, or the next start after a crash, sees the old or the new, never half.


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
