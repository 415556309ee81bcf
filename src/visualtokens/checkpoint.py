"""Loading trained models: ``visualtokens.load("run/")``, whatever their task.

``timm.create_model("local-dir:<folder>", pretrained=True)`` loads a classifier too, after
``import visualtokens``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from visualtokens.data import Preprocess
from visualtokens.errors import UserError
from visualtokens.files import (
    CONFIG,
    WEIGHTS,
    contiguous_weights,
    read_config,
    write_atomically,
    write_config,
    write_weights,
)
from visualtokens.tasks import Checkpoint, get_task
from visualtokens.tasks.hub import checkpoint_folder
from visualtokens.tasks.schema import check_task, naming
from visualtokens.tasks.task import DEFAULT_TASK


def load(path: str | Path, *, device: str = "cpu") -> Checkpoint:
    """Load what ``vtok train --out`` or timm's ``save_for_hf`` wrote, from a folder or the Hugging Face Hub.

    ``path`` is a folder, or ``hf-hub:ORGANIZATION/NAME``, with ``@REVISION`` for another version than the
    newest; what is downloaded stays in the cache of the Hub. No code in the folder is run, no other file than
    ``config.json`` and ``model.safetensors`` is read, and weights that are not finite are refused.

    >>> run = visualtokens.load("run/")
    >>> run.predict(image).top  # a classifier: the most probable classes

    The model is in eval mode on ``device`` (``auto`` is the accelerator of this machine, or its CPU).
    """
    folder = checkpoint_folder(path)
    config = read_config(folder)
    with naming(folder / CONFIG):
        task = get_task(check_task(config.get("task", DEFAULT_TASK)))
    where = pick_device(device)
    checkpoint = task.load(folder, config)
    checkpoint.model.to(where)
    return checkpoint


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Load a classifier; see :func:`load`."""
    return get_task("classify").load(checkpoint_folder(path))


def save_checkpoint(
    out: str | Path,
    model: nn.Module,
    *,
    classes: Sequence[str],
    preprocess: Preprocess,
    model_args: Mapping[str, Any],
    training: Mapping[str, Any],
) -> None:
    """Write a classifier as a checkpoint folder; each file is replaced atomically.

    ``model_args`` are those the model was built with, ``training`` the options of the run. ``init_from``,
    the source of initial weights, is not saved.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    classify: Any = get_task("classify")
    config = classify.describe_model(model, classes=classes, preprocess=preprocess, model_args=model_args)
    weights = contiguous_weights(model)
    write_atomically(folder / WEIGHTS, lambda path: write_weights(path, weights))
    write_atomically(folder / CONFIG, lambda path: write_config(path, config | {"training": dict(training)}))


def pick_device(name: str) -> torch.device:
    """Return the device called ``name``; ``"auto"`` is the accelerator of this machine, or its CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"unknown device {name!r}; choose auto, cpu, cuda, cuda:1 or mps") from error
    if device.type == "cpu":
        return device
    if accelerator is None or accelerator.type != device.type:
        has = "no accelerator" if accelerator is None else f"only {accelerator.type}"
        raise UserError(f"device {name!r} is not available: this machine has {has}; use auto or cpu")
    if device.index is not None and device.index >= torch.accelerator.device_count():
        count = torch.accelerator.device_count()
        raise UserError(f"device {name!r} does not exist: the last one is {device.type}:{count - 1}")
    return device
