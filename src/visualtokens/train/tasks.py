"""From the options of a run to its task. A new task is one more entry in :data:`TASKS`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from visualtokens.checkpoint import Checkpoint, load_checkpoint, read_config, read_weights
from visualtokens.data import PRESETS, Augment, Preprocess, open_dataset
from visualtokens.errors import UserError, unknown
from visualtokens.tasks.classify import (
    Classify,
    ClassifyLoss,
    Teacher,
    build_model,
    preprocess_for,
    sized_args,
    timm_cfg,
)
from visualtokens.tasks.task import Task
from visualtokens.train.config import TrainConfig, drop_path_rate, refuse, shows_digits


def open_task(config: TrainConfig) -> Task[Any, Any]:
    """Open the data and build the model that the configuration names; writes nothing.

    Seeds torch's global generator, which decides the first weights.
    """
    if config.task not in TASKS:
        raise unknown("task", config.task, TASKS)
    torch.manual_seed(config.seed)
    return TASKS[config.task](config)


def _classify(config: TrainConfig) -> Classify:
    refuse(config, ("loss_args",))
    train_set, val_set = open_dataset(config.data, "train"), open_dataset(config.data, "val")
    classes = train_set.classes
    model_args = all_model_args(config)
    model = build_model(config.model, classes=len(classes), model_args=model_args)
    preprocess = preprocess_for(model, size=config.size)
    if config.init is not None:
        start_from(model, config.init, classes=classes, size=preprocess.size)
    distill = 0.0
    if config.teacher is not None:
        distill = 0.5 if config.distill is None else config.distill
    return Classify(
        model,
        train_set=train_set,
        val_set=val_set,
        preprocess=preprocess,
        model_args=model_args,
        augment=augment_of(config),
        loss=ClassifyLoss(
            smoothing=config.label_smoothing,
            mixup=config.mixup,
            cutmix=config.cutmix,
            distill=distill,
            temperature=config.distill_temperature or 1.0,
        ),
        teacher=None if config.teacher is None else _teacher(config.teacher, classes, preprocess),
    )


def _segment(config: TrainConfig) -> Task[Any, Any]:
    from visualtokens.train.segment import open_segment  # what it needs takes a second to import

    return open_segment(config)


def _detect(config: TrainConfig) -> Task[Any, Any]:
    from visualtokens.train.detect import open_detect

    return open_detect(config)


TASKS: dict[str, Callable[[TrainConfig], Task[Any, Any]]] = {
    "classify": _classify,
    "segment": _segment,
    "detect": _detect,
}


def all_model_args(config: TrainConfig) -> dict[str, Any]:
    """The arguments of the model, with those that other options decide."""
    arguments = sized_args(config.model, config.model_args, size=config.size)
    if config.drop_path is None:
        return arguments
    return arguments | {"drop_path_rate": drop_path_rate(config.drop_path, config.model)}


def augment_of(config: TrainConfig) -> Augment:
    """How training images are varied: the preset, with what the other options add to it."""
    preset = config.augment or ("digits" if shows_digits(config.data) else "photo")
    if preset not in PRESETS:
        raise unknown("augmentation", preset, PRESETS)
    return dataclasses.replace(PRESETS[preset], policy=config.auto_augment, erase=config.random_erasing)


def _teacher(name: str, classes: Sequence[str], given: Preprocess) -> Teacher:
    """A checkpoint folder, or a model of timm with the weights that timm fetches."""
    model: nn.Module
    if Path(name).exists():
        checkpoint = load_checkpoint_for(name, option="teacher")
        model, own, count = checkpoint.model, checkpoint.preprocess, len(checkpoint.classes)
        if checkpoint.classes != list(classes):
            raise UserError(f"teacher {name!r} was trained for other classes than those of the data")
    elif timm.is_model(name):
        try:
            model = timm.create_model(name, pretrained=True)
        except (OSError, RuntimeError, ValueError) as error:
            text = " ".join(str(error).split())[:200]
            raise UserError(f"teacher {name!r}: timm cannot fetch its weights: {text}") from error
        own, count = preprocess_for(model), int(model.num_classes)  # type: ignore[arg-type]
    else:
        raise unknown("teacher", name, timm.list_models(pretrained=True))
    if count != len(classes):
        raise UserError(f"teacher {name!r} knows {count} classes, the data have {len(classes)}")
    return Teacher(model, own=own, given=given)


# Starting from the weights of another run.


def load_checkpoint_for(folder: str, *, option: str) -> Checkpoint:
    """The checkpoint that an option names."""
    try:
        return load_checkpoint(folder)
    except UserError as error:
        raise UserError(f"{option}: {error}") from error


def start_from(model: nn.Module, folder: str, *, classes: Sequence[str], size: tuple[int, int]) -> None:
    """Give ``model`` the weights in the folder; its head only if that was trained for the same classes.

    Position embeddings of timm's models are resampled to ``size``.
    """
    source = load_checkpoint_for(folder, option="init")
    resize = getattr(source.model, "set_input_size", None)
    if source.preprocess.size != size and resize is not None:
        resize(img_size=size)
    weights = source.model.state_dict()
    if source.classes != list(classes):
        heads = _heads(model)
        weights = {name: w for name, w in weights.items() if not name.startswith(heads)}
    wanted: dict[str, Any] = model.state_dict()
    misfits = [n for n in weights if n not in wanted or wanted[n].shape != weights[n].shape]
    misfits += [name for name in wanted if name not in weights and not name.startswith(_heads(model))]
    if misfits:
        raise _misfit(source.config["architecture"], folder, misfits)
    model.load_state_dict(weights, strict=False)


def start_dense(
    model: nn.Module, folder: str, *, task: str, classes: Sequence[str], body: str, heads: Sequence[str]
) -> None:
    """Give a model with a backbone the weights in the folder.

    Of a model of the same ``task`` all, but what tells classes apart only if they are the same ones: the
    weights with one of ``heads`` in their names. Of a classifier those of the backbone, which is the part
    ``body`` of the model.
    """
    config, weights = read_config(Path(folder)), read_weights(Path(folder))
    wanted = model.state_dict()
    if config.get("task") == task:
        same = config.get("label_names") == list(classes)
        found = {name: weights.get(name) for name in wanted if same or not any(h in name for h in heads)}
    else:
        # A model that gives maps has the names of the classifier, some below "model.", some with the first
        # dots as underscores (stages_0.blocks).
        known = {_plain(name): weight for name, weight in weights.items()}
        own = [name for name in wanted if name.startswith(body)]
        found = {name: known.get(_plain(name.removeprefix(body).removeprefix("model."))) for name in own}
    misfits = [n for n, weight in found.items() if weight is None or weight.shape != wanted[n].shape]
    if misfits:
        raise _misfit(config.get("architecture"), folder, misfits)
    model.load_state_dict(found, strict=False)


def _plain(name: str) -> str:
    return name.replace(".", "_")


def _misfit(architecture: object, folder: str, names: Sequence[str]) -> UserError:
    return UserError(
        f"init: the weights of {architecture!r} in {folder!r} do not fit the model: {len(names)} "
        f"differ, the first one is {names[0]}; give the same --model and --model_args"
    )


def _heads(model: nn.Module) -> tuple[str, ...]:
    """How the names of the classifier's weights begin."""
    names = timm_cfg(model).get("classifier") or ()
    return tuple(f"{name}." for name in ([names] if isinstance(names, str) else names))
