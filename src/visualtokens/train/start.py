"""Starting from the weights of another run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from visualtokens.errors import UserError
from visualtokens.tasks.build import timm_cfg
from visualtokens.train.checkpoint import Checkpoint, load_checkpoint


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
        architecture = source.config["architecture"]
        raise UserError(
            f"init: the weights of {architecture!r} in {folder!r} do not fit the model: {len(misfits)} "
            f"differ, the first one is {misfits[0]}; give the same --model and --model_args"
        )
    model.load_state_dict(weights, strict=False)


def _heads(model: nn.Module) -> tuple[str, ...]:
    """How the names of the classifier's weights begin."""
    names = timm_cfg(model).get("classifier") or ()
    return tuple(f"{name}." for name in ([names] if isinstance(names, str) else names))
