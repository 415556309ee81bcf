"""From released names to ours. A family of checkpoints is a table of rules; see ``paca.py``."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visualtokens.errors import UserError, unknown
from visualtokens.models import create_model, list_models

# What a table of names consists of.


class Rule(NamedTuple):
    """Names that match ``pattern`` as a whole become ``target``, with the groups of the match filled in.

    ``{0}`` is the first group; ``{0-}`` and ``{0+}`` are it as a number less or plus one, for those who
    count stages from 1, or a transition to the stage before it.
    """

    pattern: str
    target: str | None  # None: a constant, or what only training needed; known, and left out
    part: int | None = None  # this tensor is one of several that become one, stacked in this order
    # The dimension from which on the tensor is flattened: 1 for a 1×1 convolution that is a Linear here,
    # 0 for what is a vector here.
    flatten: int | None = None

    def apply(self, name: str) -> str | None:
        """The new name; None where the rule does not match, empty for what is left out."""
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return None
        if self.target is None:
            return ""
        return _PLACE.sub(lambda place: _fill(place, match), self.target)


_PLACE = re.compile(r"\{(\d)([-+]?)\}")


def _fill(place: re.Match[str], match: re.Match[str]) -> str:
    value = match[int(place[1]) + 1]
    return str(int(value) + int(f"{place[2]}1")) if place[2] else value


@dataclass(frozen=True)
class Layout:
    """How one kind of checkpoint names its parameters."""

    sign: str  # a name that matches this is in every checkpoint of this kind, and in no other of its family
    rules: Sequence[Rule]


@dataclass(frozen=True)
class Family:
    """The checkpoints of one paper."""

    models: str  # pattern of the registered models that they may belong to
    layouts: Sequence[Layout]
    options: Mapping[str, Any] = field(default_factory=dict)  # what else the model must be created with


# Names in the checkpoints of PaCa-ViT tiny, small and base.

PACA_BLOCK = r"stage(\d)\.(\d+)\."
PACA_OURS = "stages.{0-}.blocks.{1}."
PACA_END = r"(weight|bias)"

COMMON = [
    Rule(rf"patch_embed\.proj\.0\.{PACA_END}", "stages.0.embed.first.{0}"),
    Rule(rf"patch_embed\.proj\.1\.{PACA_END}", "stages.0.embed.conv.{0}"),
    Rule(rf"patch_embed\.norm\.{PACA_END}", "stages.0.embed.norm.{0}"),
    # Stages are counted from 1, and transition 1 leads into the second.
    Rule(rf"transition(\d)\.proj\.{PACA_END}", "stages.{0}.embed.conv.{1}"),
    Rule(rf"transition(\d)\.norm\.{PACA_END}", "stages.{0}.embed.norm.{1}"),
    Rule(rf"norm(\d)\.{PACA_END}", "stages.{0-}.norm.{1}"),
    Rule(rf"head\.{PACA_END}", "head.{0}"),
    Rule(rf"{PACA_BLOCK}norm([12])_before\.{PACA_END}", PACA_OURS + "norm{2}.{3}"),
    Rule(rf"{PACA_BLOCK}attn\.cluster_norm\.{PACA_END}", PACA_OURS + "attn.norm.{2}"),
    Rule(rf"{PACA_BLOCK}attn\.(q|proj)\.{PACA_END}", PACA_OURS + "attn.{2}.{3}"),
    Rule(rf"{PACA_BLOCK}attn\.k\.{PACA_END}", PACA_OURS + "attn.kv.{2}", part=0),
    Rule(rf"{PACA_BLOCK}attn\.v\.{PACA_END}", PACA_OURS + "attn.kv.{2}", part=1),
    Rule(rf"{PACA_BLOCK}mlp\.(fc[12])\.{PACA_END}", PACA_OURS + "ffn.{2}.{3}"),
    Rule(rf"{PACA_BLOCK}mlp\.dwconv\.dwconv\.{PACA_END}", PACA_OURS + "ffn.dwconv.{2}"),
]

CLUSTERING = rf"{PACA_BLOCK}attn\.clustering\.clustering\."
OUR_CLUSTERING = PACA_OURS + "attn.clustering."

CONV = [
    Rule(rf"{CLUSTERING}0\.{PACA_END}", OUR_CLUSTERING + "conv.{2}"),
    Rule(rf"{CLUSTERING}2\.weight", OUR_CLUSTERING + "mix.weight", flatten=1),
    Rule(rf"{CLUSTERING}2\.bias", OUR_CLUSTERING + "mix.bias"),
    Rule(rf"{CLUSTERING}4\.weight", OUR_CLUSTERING + "assign.weight", flatten=1),
]
MLP = [
    Rule(rf"{CLUSTERING}0\.{PACA_END}", OUR_CLUSTERING + "fc.{2}"),
    Rule(rf"{CLUSTERING}2\.{PACA_END}", OUR_CLUSTERING + "assign.{2}"),
]

PACA = Family(
    models="paca_vit_*",
    layouts=[
        Layout(sign=rf"{CLUSTERING}4\.weight", rules=[*COMMON, *CONV]),
        Layout(sign=rf"{CLUSTERING}2\.bias", rules=[*COMMON, *MLP]),
    ],
)


# Names in the checkpoints of STViT small, base and large.

STVIT_BLOCK = r"layers\.(\d)\.blocks\.(\d+)\."
STVIT_OURS = "stages.{0}.blocks.{1}."
STVIT_END = r"(weight|bias)"
NORM_END = r"(weight|bias|running_mean|running_var|num_batches_tracked)"

RULES = [
    Rule(rf"patch_embed\.proj\.(\d+)\.{NORM_END}", "stages.0.embed.{0}.{1}"),
    # A stage ends with the transition to the next one; ours begins with it.
    Rule(rf"layers\.(\d)\.downsample\.proj\.([01])\.{NORM_END}", "stages.{0+}.embed.{1}.{2}"),
    Rule(rf"{STVIT_BLOCK}pos_embed\.conv\.{STVIT_END}", STVIT_OURS + "cpe.{2}"),
    Rule(rf"{STVIT_BLOCK}norm1\.norm\.{STVIT_END}", STVIT_OURS + "norm1.{2}"),
    Rule(rf"{STVIT_BLOCK}norm2\.{NORM_END}", STVIT_OURS + "norm2.{2}"),
    Rule(rf"{STVIT_BLOCK}attn\.(un)?fold\.weights", None),  # identity kernels
    Rule(
        rf"{STVIT_BLOCK}attn\.stoken_refine\.(qkv|proj)\.weight",
        STVIT_OURS + "attn.mix.{2}.weight",
        flatten=1,
    ),
    Rule(rf"{STVIT_BLOCK}attn\.stoken_refine\.(qkv|proj)\.bias", STVIT_OURS + "attn.mix.{2}.bias"),
    Rule(rf"{STVIT_BLOCK}gamma_([12])", STVIT_OURS + "scale{2}.gamma", flatten=0),
    Rule(rf"{STVIT_BLOCK}mlp2\.(fc[12])\.weight", STVIT_OURS + "ffn.{2}.weight", flatten=1),
    Rule(rf"{STVIT_BLOCK}mlp2\.(fc[12])\.bias", STVIT_OURS + "ffn.{2}.bias"),
    Rule(rf"{STVIT_BLOCK}mlp2\.conv\.conv\.{STVIT_END}", STVIT_OURS + "ffn.dwconv.{2}"),
    Rule(rf"proj\.{STVIT_END}", "final.0.{0}"),
    Rule(rf"norm\.{NORM_END}", "final.1.{0}"),
    Rule(rf"head\.{STVIT_END}", "head.{0}"),
]

STVIT = Family(
    models="stvit_*",
    layouts=[Layout(sign=rf"{STVIT_BLOCK}attn\.stoken_refine\.qkv\.weight", rules=RULES)],
    options={"border": "released"},
)


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
