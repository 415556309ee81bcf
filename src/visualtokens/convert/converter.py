"""From released names to ours. A family of checkpoints is a table of rules; see ``paca.py``."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visualtokens.convert.paca import PACA
from visualtokens.convert.rules import Family, Layout, Rule
from visualtokens.convert.stvit import STVIT
from visualtokens.errors import UserError, unknown
from visualtokens.models import create_model, list_models

FAMILIES: Mapping[str, Family] = {"paca": PACA, "stvit": STVIT}

WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # the averaged weights are the better ones
HEAD = "head.weight"
Shapes = dict[str, torch.Size]


@dataclass(frozen=True)
class Converted:
    """A checkpoint under our names, and whatever did not come over.

    >>> found = visualtokens.convert(torch.load("pacavit_small.pth"), "paca")
    >>> model = visualtokens.create_model(found.model, num_classes=found.classes, **found.options)
    >>> model.load_state_dict(found.state_dict)
    """

    state_dict: dict[str, Tensor]
    model: str  # the registered model that the weights fit best
    classes: int  # of its classifier; 0 if the checkpoint has none
    options: dict[str, Any]  # with which to create the model so that it computes what the released one does
    unknown: list[str]  # names in the checkpoint that no rule knows; left out
    missing: list[str]  # names of the model that the checkpoint does not give
    misfits: list[str]  # names on both sides with different shapes, with the shapes

    @property
    def complete(self) -> bool:
        """Whether every tensor found its place and every place its tensor."""
        return not (self.unknown or self.missing or self.misfits)


def convert(checkpoint: Mapping[str, Any], family: str) -> Converted:
    """Rename the parameters of a released checkpoint to ours, and find the model that they fit.

    ``family`` is ``"paca"`` or ``"stvit"``. ``checkpoint`` is a state dict, as it is or wrapped as training
    scripts save it (``{"model": …}``, names that start with ``module.``). No weights come with this library.
    """
    if family not in FAMILIES:
        raise unknown("family of checkpoints", family, FAMILIES)
    released = _unwrap(checkpoint)
    layout = _layout(family, released)
    state_dict, strangers = _rename(released, layout)
    model, shapes = _best_fit(FAMILIES[family], state_dict)
    return Converted(
        state_dict=state_dict,
        model=model,
        classes=_classes(state_dict),
        options=dict(FAMILIES[family].options),
        unknown=strangers,
        missing=[name for name in shapes if name not in state_dict],
        misfits=[
            f"{name}: {_text(tensor.shape)} in the checkpoint, {_text(shapes[name])} in {model}"
            if name in shapes
            else f"{name}: not in {model}"
            for name, tensor in state_dict.items()
            if shapes.get(name) != tensor.shape
        ],
    )


def _unwrap(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    for key in WRAPPERS:
        if isinstance(checkpoint.get(key), Mapping):
            checkpoint = checkpoint[key]
            break
    tensors = {k.removeprefix("module."): v for k, v in checkpoint.items() if isinstance(v, Tensor)}
    if not tensors:
        raise UserError(
            f"no tensors in the checkpoint, only {', '.join(map(repr, list(checkpoint)[:5])) or 'nothing'}; "
            "give the state dict"
        )
    return tensors


def _layout(family: str, released: Mapping[str, Tensor]) -> Layout:
    for layout in FAMILIES[family].layouts:
        if any(re.fullmatch(layout.sign, name) for name in released):
            return layout
    raise UserError(
        f"this is no checkpoint of {family!r}: {next(iter(released))!r} and the others are not its names; "
        f"give one of the released files"
    )


def _rename(released: Mapping[str, Tensor], layout: Layout) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors under their new names, and the old names that no rule knows."""
    renamed: dict[str, Tensor] = {}
    parts: dict[str, dict[int, str]] = defaultdict(dict)  # new name: the old name of each of its parts
    strangers = []
    for name, tensor in released.items():
        found = _find(name, layout)
        if found is None:
            strangers.append(name)
            continue
        rule, target = found
        if rule.part is not None:
            parts[target][rule.part] = name
        elif target:
            renamed[target] = tensor if rule.flatten is None else tensor.flatten(rule.flatten)
    wanted = max((len(names) for names in parts.values()), default=0)
    for target, names in parts.items():
        if len(names) < wanted:
            strangers += names.values()  # a key without its value cannot be used
        else:
            renamed[target] = torch.cat([released[names[i]] for i in sorted(names)])
    return renamed, strangers


def _find(name: str, layout: Layout) -> tuple[Rule, str] | None:
    for rule in layout.rules:
        target = rule.apply(name)
        if target is not None:
            return rule, target
    return None


def _best_fit(family: Family, state_dict: Mapping[str, Tensor]) -> tuple[str, Shapes]:
    """The model of the family with the most names and shapes in common, of equals the smallest."""
    classes = _classes(state_dict)
    candidates = {name: _shapes(name, classes) for name in list_models(family.models)}

    def fit(name: str) -> tuple[int, int]:
        shapes = candidates[name]
        common = sum(shapes.get(key) == tensor.shape for key, tensor in state_dict.items())
        return common, -len(shapes)

    best = max(candidates, key=fit)
    return best, candidates[best]


@functools.cache
def _shapes(name: str, classes: int) -> Shapes:
    with torch.device("meta"):  # only names and shapes matter
        model = create_model(name, num_classes=classes)
    return {key: tensor.shape for key, tensor in model.state_dict().items()}


def _classes(state_dict: Mapping[str, Tensor]) -> int:
    return state_dict[HEAD].shape[0] if HEAD in state_dict else 0


def _text(shape: torch.Size) -> str:
    return "×".join(map(str, shape))
