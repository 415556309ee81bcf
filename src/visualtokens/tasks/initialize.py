"""Initial weights from the checkpoint of another run (``--init``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from visualtokens.data.base import brief
from visualtokens.errors import UserError
from visualtokens.files import WEIGHTS, check_finite, read_config, read_weights
from visualtokens.tasks.task import Checkpoint
from visualtokens.tasks.timm_models import timm_cfg


def initialize_classifier(
    model: nn.Module, source: Checkpoint, *, folder: str, classes: Sequence[str], size: tuple[int, int]
) -> None:
    """Load the weights of another classifier; a head for different classes keeps its new weights.

    Position embeddings that were learned for another size are resampled to ``size``.
    """
    head, expected = _head_prefixes(model), model.state_dict()
    resize: Any = getattr(source.model, "set_input_size", None)
    weights: dict[str, Tensor] = source.model.state_dict()
    others = {name: w.shape for name, w in weights.items() if not name.startswith(head)}
    if resize is not None and any(n in expected and expected[n].shape != s for n, s in others.items()):
        resize(img_size=size)
        weights = source.model.state_dict()
    if source.classes != list(classes):
        weights = {name: w for name, w in weights.items() if not name.startswith(head)}
    misfits = [n for n in weights if n not in expected or expected[n].shape != weights[n].shape]
    misfits += [name for name in expected if name not in weights and not name.startswith(head)]
    _load(model, weights, misfits, source.config, folder)


def _head_prefixes(model: nn.Module) -> tuple[str, ...]:
    names = timm_cfg(model).get("classifier") or ()
    return tuple(f"{name}." for name in ([names] if isinstance(names, str) else names))


def initialize_dense(
    model: nn.Module, folder: str, *, task: str, classes: Sequence[str], body: str, heads: Sequence[str]
) -> None:
    """Load the weights of a model of the same ``task``, or of a classifier for the backbone.

    From the same task all weights are loaded; those with one of ``heads`` in their name, which depend on the
    classes, only if the classes are the same. From a classifier those of the backbone are loaded, whose
    names start with ``body``.
    """
    config, weights = read_config(Path(folder)), read_weights(Path(folder))
    check_finite(weights, Path(folder) / WEIGHTS)
    expected = model.state_dict()
    if config.get("task") == task:
        same = config.get("label_names") == list(classes)
        found = {name: weights.get(name) for name in expected if same or not any(h in name for h in heads)}
    else:
        # timm's feature extractors prefix the classifier's names by "model." or replace the first dots by
        # underscores (stages_0.blocks).
        known = {_flat(name): weight for name, weight in weights.items()}
        own = [name for name in expected if name.startswith(body)]
        found = {name: known.get(_flat(name.removeprefix(body).removeprefix("model."))) for name in own}
    misfits = [n for n, weight in found.items() if weight is None or weight.shape != expected[n].shape]
    _load(model, found, misfits, config, folder)


def _flat(name: str) -> str:
    return name.replace(".", "_")


def _load(
    model: nn.Module,
    weights: Mapping[str, Any],
    misfits: Sequence[str],
    config: Mapping[str, Any],
    folder: str,
) -> None:
    if misfits:
        raise UserError(
            f"init: the weights of {brief(config.get('architecture'))} in {folder!r} do not fit the model: "
            f"{len(misfits)} differ, the first is {misfits[0]}; give the same --model and --model_args"
        )
    model.load_state_dict(weights, strict=False)
