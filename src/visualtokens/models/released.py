"""Renames the weights of released checkpoints, all of them or none.

Models with :class:`ReleasedNames` do so by themselves with what ``load_state_dict`` and timm's
``checkpoint_path`` give them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visualtokens.errors import UserError
from visualtokens.models.released_names import FAMILIES, Layout, Rule
from visualtokens.tables import printable


def find_layout(names: Iterable[str]) -> Layout | None:
    """Returns the layout of a checkpoint whose names are not those of a model here or in timm."""
    known = list(names)
    layouts = (layout for family in FAMILIES.values() for layout in family if layout.rules)
    return next((layout for layout in layouts if layout.fits(known)), None)


def rename(released: Mapping[str, Tensor], layout: Layout) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the tensors under their new names, and the old names that no rule matches."""
    if not layout.rules:
        return dict(released), []
    renamed: dict[str, Tensor] = {}
    parts: dict[str, dict[int, str]] = defaultdict(dict)  # new name → the old name of each part
    unmatched = []
    for name, tensor in released.items():
        found = _find_rule(name, layout)
        if found is None:
            unmatched.append(name)
            continue
        rule, target = found
        if rule.part is not None:
            parts[target][rule.part] = name
        elif target:
            renamed[target] = tensor if rule.flatten is None else tensor.flatten(rule.flatten)
    wanted = max((len(names) for names in parts.values()), default=0)
    for target, names in parts.items():
        if len(names) < wanted:
            unmatched += names.values()  # such as a key without its value
        else:
            renamed[target] = torch.cat([released[names[i]] for i in sorted(names)])
    return renamed, unmatched


def _find_rule(name: str, layout: Layout) -> tuple[Rule, str] | None:
    for rule in layout.rules:
        target = rule.apply(name)
        if target is not None:
            return rule, target
    return None


@dataclass(frozen=True)
class Differences:
    """The names and shapes in which weights differ from those of a model."""

    unknown: list[str]  # names of the weights that the model does not have
    missing: list[str]  # names of the model that the weights do not have
    misfits: list[str]  # names with different shapes, with both shapes

    def __str__(self) -> str:
        groups = {"missing": self.missing, "unknown": self.unknown, "of another shape": self.misfits}
        return "; ".join(f"{len(names)} {what}: {_some(names)}" for what, names in groups.items() if names)


def compare(
    weights: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    *,
    model: str,
    unmatched: Sequence[str] = (),
) -> Differences:
    """Returns how weights differ from the ``shapes`` of a model; ``unmatched`` names are unknown too."""
    return Differences(
        unknown=[*unmatched, *(name for name in weights if name not in shapes)],
        # Files of old versions of PyTorch have no counters, and they are not used.
        missing=[n for n in shapes if n not in weights and not n.endswith("num_batches_tracked")],
        misfits=[
            f"{name}: {_text(tensor.shape)} in the checkpoint, {_text(shapes[name])} in {model}"
            for name, tensor in weights.items()
            if name in shapes and shapes[name] != tensor.shape
        ],
    )


SHOWN = 5  # names in a message


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(printable(name)[:150] for name in names[:SHOWN])
    return shown + (", …" if len(names) > SHOWN else "")


def _text(shape: torch.Size) -> str:
    return "×".join(map(str, shape)) or "a number"


class ReleasedNames:
    """``load_state_dict`` of models that also takes the weights of a released checkpoint, under its names."""

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of ``nn.Module``; released names that do not fit load nothing and raise :class:`UserError`."""
        layout = find_layout(state_dict)
        if layout is None:
            return super().load_state_dict(state_dict, strict, assign)  # type: ignore[misc]
        renamed, unmatched = rename(state_dict, layout)
        shapes = {name: tensor.shape for name, tensor in self.state_dict().items()}  # type: ignore[attr-defined]
        found = compare(renamed, shapes, model="the model", unmatched=unmatched)
        if strict and str(found):
            raise UserError(f"the released checkpoint does not fit, so nothing was loaded; {found}")
        self.use_released(layout.options)
        return super().load_state_dict(renamed, strict, assign)  # type: ignore[misc]

    def use_released(self, options: Mapping[str, Any]) -> None:
        """Computes as the model that was released with these arguments of ``create_model``."""


def rename_released(state_dict: Mapping[str, Any], model: Any) -> Mapping[str, Any]:
    """Returns the weights for ``model`` under its names: timm's ``pretrained_filter_fn``."""
    layout = find_layout(state_dict)
    if layout is None:
        return state_dict
    renamed, unmatched = rename(state_dict, layout)
    if isinstance(model, ReleasedNames):
        model.use_released(layout.options)
    return renamed | {name: state_dict[name] for name in unmatched}
