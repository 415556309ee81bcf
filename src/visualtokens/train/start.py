"""Starting from the weights of another run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from visualtokens.errors import UserError
from visualtokens.tasks.build import timm_cfg
from visualtokens.train.checkpoint import Checkpoint, load_checkpoint, read_config, read_weights


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
