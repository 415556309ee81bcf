"""The model to reduce, the images to measure it on, and its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn

from visualtokens.checkpoint import load_checkpoint, save_checkpoint
from visualtokens.converters import convert
from visualtokens.data import BadImage, ImageDataset, Preprocess, read_image
from visualtokens.data.base import with_classes
from visualtokens.data.decode import EXTENSIONS
from visualtokens.data.folder import Walk
from visualtokens.errors import UserError, unknown
from visualtokens.files import one_line
from visualtokens.progress import count as number_of
from visualtokens.progress import one_image, track
from visualtokens.reduce.families import encoder_of
from visualtokens.reduce.reduction import reduce, restore
from visualtokens.tasks.hub import pretrained_model
from visualtokens.tasks.timm_models import class_names, preprocess_for


class Opened(NamedTuple):
    """The model to reduce."""

    model: nn.Module
    classes: list[str] | None  # their names, if known
    preprocess: Preprocess
    model_args: dict[str, Any]  # that it was built with


def open_model(name: str, *, weights: str | None = None, size: tuple[int, int] | None = None) -> Opened:
    """Open the checkpoint folder or the timm model ``name``, at another image ``size`` (H, W) if given.

    ``weights`` of a timm model are a file, ``"pretrained"``, or random.
    """
    classes: list[str] | None = None
    model_args: dict[str, Any] = {}
    if Path(name).exists():
        if weights is not None:
            raise UserError(f"{name!r} has weights of its own; leave --weights out")
        checkpoint = load_checkpoint(name)
        model, classes, preprocess = checkpoint.model, checkpoint.classes, checkpoint.preprocess
        model_args = dict(checkpoint.config.get("model_args", {}))
    else:
        model = named_model(name, weights, size, kind="model (or checkpoint folder)")
        preprocess = preprocess_for(model)
    encoder = encoder_of(model)
    if encoder.reduced:
        raise UserError(f"{name!r} is already reduced; give a checkpoint of the whole model")
    if size is not None:
        model_args["img_size"] = list(size)
        if size != encoder.image_size:
            encoder.module.set_input_size(img_size=size)
    return Opened(model.eval(), classes, replace(preprocess, size=encoder.image_size), model_args)


def named_model(
    name: str, weights: str | None, size: tuple[int, int] | None = None, *, kind: str = "model"
) -> nn.Module:
    """Return a timm model with ``weights``: a file, ``"pretrained"``, or random. Errors call it ``kind``."""
    if not timm.is_model(name):
        raise unknown(kind, name, timm.list_models())
    sized: dict[str, Any] = {} if size is None else {"img_size": size}
    if weights is None:
        return timm.create_model(name, **sized)
    if weights == "pretrained":
        origin = f"the weights of {name!r}"
        return pretrained_model(name, origin=origin, instead="--weights FILE", model_args=sized)
    if not Path(weights).is_file():
        raise UserError(f"weights {weights!r} is not a file; give a .safetensors or .pth file, or pretrained")
    found = convert(weights, name)
    model = timm.create_model(name, num_classes=found.classes, **sized)
    try:
        model.load_state_dict(found.state_dict)
    except RuntimeError as error:
        hint = "" if size is None else " (is --size right?)"
        raise UserError(f"{weights} does not fit {name!r}{hint}: {one_line(error)}") from error
    return model


def save_reduced(
    out: str | Path,
    opened: Opened,
    *,
    method: str,
    keep: tuple[int, ...],
    options: Mapping[str, Any] | None = None,
) -> None:
    """Write the reduced model as a checkpoint folder."""
    classes = opened.classes or class_names(opened.model)
    reduce(opened.model, method, keep=keep, **(options or {}))
    save_checkpoint(
        out,
        opened.model,
        classes=classes,
        preprocess=opened.preprocess,
        model_args=opened.model_args,
        training={},
    )
    restore(opened.model)


def sample_images(
    dataset: ImageDataset | None,
    preprocess: Preprocess,
    classes: list[str] | None,
    *,
    count: int,
    limit: int,
) -> tuple[Tensor | None, Tensor | None, list[BadImage]]:
    """Return images ``(B, 3, H, W)`` evenly spaced in the dataset, their labels ``(B,)`` if the classes match
    those of the model, and the unreadable images."""
    if dataset is None:
        return None, None, []
    if classes is not None:
        dataset = with_classes(dataset, classes)
    wanted = min(limit or len(dataset), len(dataset))
    images, labels, bad = [], [], []
    for i in track(range(wanted), "read", unit="image", images=one_image):
        try:
            image, label = dataset[i * len(dataset) // wanted]
        except BadImage as error:
            bad.append(error)
            continue
        images.append(preprocess(image))
        labels.append(label)
    if not images:
        raise UserError(f"{number_of(wanted, 'image')} of --data could not be read; the first: {bad[0]}")
    # Only the number of classes of a timm model is known.
    same = dataset.classes == classes if classes is not None else len(dataset.classes) == count
    return torch.stack(images), torch.tensor(labels) if same else None, bad


def read_photos(folder: str, preprocess: Preprocess, *, limit: int) -> tuple[Tensor, list[BadImage]]:
    """Return at most ``limit`` images ``(B, 3, H, W)`` evenly spaced in a folder, and the unreadable ones."""
    top = Path(folder).expanduser()
    if not top.is_dir():
        raise UserError(
            f"{folder!r} {'is a file' if top.exists() else 'does not exist'}; give a folder of photos"
        )
    files = sorted(
        Path(parent, name)
        for parent, names in Walk(top)()
        for name in names
        if Path(name).suffix.lower() in EXTENSIONS
    )
    wanted = min(limit, len(files))
    images, bad = [], []
    for i in range(wanted):
        try:
            images.append(preprocess(read_image(files[i * len(files) // wanted])))
        except BadImage as error:
            bad.append(error)
    if not images:
        raise UserError(f"{folder!r} holds no photo that can be read" + (f": {bad[0]}" if bad else ""))
    return torch.stack(images), bad
