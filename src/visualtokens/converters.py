"""Converts released PaCa-ViT and STViT checkpoints, and timm checkpoints, to those of this library."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.models import save_for_hf
from torch import Tensor

from visualtokens.errors import UserError, unknown
from visualtokens.files import check_finite, read_tensors
from visualtokens.models import create_model, list_models


@dataclass(frozen=True)
class Converted:
    """A checkpoint with this library's parameter names, and the differences to the matching model."""

    state_dict: dict[str, Tensor]
    model: str  # the registered model that matches best
    classes: int  # of the classifier; 0 if the checkpoint has none
    options: dict[str, Any]  # arguments of create_model that reproduce the released model's outputs
    unknown: list[str]  # names in the checkpoint that no rule matches; left out
    missing: list[str]  # names of the model that the checkpoint lacks
    misfits: list[str]  # names with different shapes in checkpoint and model, with both shapes

    @property
    def complete(self) -> bool:
        """Whether checkpoint and model have the same names and shapes."""
        return not (self.unknown or self.missing or self.misfits)

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint folder for :func:`visualtokens.load`; its classes are numbers."""
        if not self.complete:
            first = [*self.misfits, *self.missing, *self.unknown][0]
            count = len(self.misfits) + len(self.missing) + len(self.unknown)
            raise UserError(f"{count} weights differ from those of {self.model!r}, the first is {first}")
        if not self.classes:
            raise UserError(f"the checkpoint of {self.model!r} has no classifier; give one that has")
        model = create_model(self.model, num_classes=self.classes, **self.options)
        model.load_state_dict(self.state_dict)
        save_for_hf(model, str(folder), model_args=self.options, safe_serialization=True)


def convert(checkpoint: Mapping[str, Any] | str | Path, family: str) -> Converted:
    """Renames the parameters of a released checkpoint and finds the model that they fit.

    >>> found = visualtokens.convert("pacavit_small.pth", "paca")
    >>> model = visualtokens.create_model(found.model, num_classes=found.classes, **found.options)
    >>> model.load_state_dict(found.state_dict)

    ``family`` is ``"paca"``, ``"stvit"``, or the name of a timm model whose names the checkpoint has.
    ``checkpoint`` is a .pth or .safetensors file, of which no pickled code is run, or a state dict, plain or
    as training scripts save it: inside ``{"model": …}`` or ``{"state_dict": …}``, with ``module.`` or
    ``_orig_mod.`` before each name; EMA weights are preferred. If
    :attr:`Converted.complete` is False, its ``unknown``, ``missing`` and ``misfits`` list the differences.
    :meth:`Converted.save` writes a checkpoint folder. The weights themselves are not part of this library.
    """
    if family not in FAMILIES and not timm.is_model(family):
        raise unknown("family of checkpoints", family, FAMILIES)
    if isinstance(checkpoint, str | Path):
        released = read_checkpoint(checkpoint)
    else:
        released = _unwrap(checkpoint)
        check_finite(released, "the checkpoint")
    options: dict[str, Any] = {}
    if family in FAMILIES:
        state_dict, unmatched = _rename(released, _select_layout(family, released))
        model, shapes = _best_fit(FAMILIES[family], state_dict)
        classes, options = _classes(state_dict), dict(FAMILIES[family].options)
    else:
        state_dict, unmatched, model = released, [], family
        classes = _classes(state_dict, timm.get_pretrained_cfg(family).classifier)
        shapes = _shapes(model, classes)
    return Converted(
        state_dict=state_dict,
        model=model,
        classes=classes,
        options=options,
        unknown=unmatched,
        missing=[name for name in shapes if name not in state_dict],
        misfits=[
            f"{name}: {_text(tensor.shape)} in the checkpoint, {_text(shapes[name])} in {model}"
            if name in shapes
            else f"{name}: not in {model}"
            for name, tensor in state_dict.items()
            if shapes.get(name) != tensor.shape
        ],
    )


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """Returns the finite weights of a .safetensors file or of a .pth file, of which no pickled code is run.

    The weights may be wrapped as training scripts save them; see :func:`convert`.
    """
    weights = _unwrap(read_tensors(Path(path)))
    check_finite(weights, path)
    return weights


def released_family(weights: Mapping[str, Any]) -> str | None:
    """Returns the family of :func:`convert` whose released checkpoints have these names; None if none has."""
    for name, family in FAMILIES.items():
        if any(re.fullmatch(layout.sign, key) for layout in family.layouts for key in weights):
            return name
    return None


# A family of checkpoints is a table of renaming rules.


class Rule(NamedTuple):
    """Renames a parameter whose whole name matches ``pattern`` to ``target``.

    In the target, ``{0}`` is the first group of the match; ``{0-}`` and ``{0+}`` are its number minus and
    plus one.
    """

    pattern: str
    target: str | None  # None drops the parameter: a constant, or used in training only
    part: int | None = None  # position of this tensor among several that are concatenated
    flatten: int | None = None  # first dimension to flatten: 1 for a 1×1 convolution → Linear, 0 → vector

    def apply(self, name: str) -> str | None:
        """Returns the new name, "" for a dropped parameter, or None if the rule does not match."""
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return None
        if self.target is None:
            return ""
        return _PLACEHOLDER.sub(lambda placeholder: _fill(placeholder, match), self.target)


_PLACEHOLDER = re.compile(r"\{(\d)([-+]?)\}")


def _fill(placeholder: re.Match[str], match: re.Match[str]) -> str:
    value = match[int(placeholder[1]) + 1]
    return str(int(value) + int(f"{placeholder[2]}1")) if placeholder[2] else value


@dataclass(frozen=True)
class Layout:
    """The parameter names of one kind of checkpoint."""

    sign: str  # pattern of a name that identifies this layout within its family
    rules: Sequence[Rule]


@dataclass(frozen=True)
class Family:
    """The checkpoints released with one paper."""

    models: str  # pattern of the registered models
    layouts: Sequence[Layout]
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of create_model


END = r"(weight|bias)"
NORM_END = r"(weight|bias|running_mean|running_var|num_batches_tracked)"

# PaCa-ViT tiny, small and base. Stages are counted from 1; transition 1 precedes the second stage.
PACA_BLOCK, PACA_OURS = r"stage(\d)\.(\d+)\.", "stages.{0-}.blocks.{1}."
PACA_CLUSTERING, PACA_OUR_CLUSTERING = (
    rf"{PACA_BLOCK}attn\.clustering\.clustering\.",
    PACA_OURS + "attn.clustering.",
)
PACA_COMMON = [
    Rule(rf"patch_embed\.proj\.0\.{END}", "stages.0.embed.first.{0}"),
    Rule(rf"patch_embed\.proj\.1\.{END}", "stages.0.embed.conv.{0}"),
    Rule(rf"patch_embed\.norm\.{END}", "stages.0.embed.norm.{0}"),
    Rule(rf"transition(\d)\.proj\.{END}", "stages.{0}.embed.conv.{1}"),
    Rule(rf"transition(\d)\.norm\.{END}", "stages.{0}.embed.norm.{1}"),
    Rule(rf"norm(\d)\.{END}", "stages.{0-}.norm.{1}"),
    Rule(rf"head\.{END}", "head.{0}"),
    Rule(rf"{PACA_BLOCK}norm([12])_before\.{END}", PACA_OURS + "norm{2}.{3}"),
    Rule(rf"{PACA_BLOCK}attn\.cluster_norm\.{END}", PACA_OURS + "attn.norm.{2}"),
    Rule(rf"{PACA_BLOCK}attn\.(q|proj)\.{END}", PACA_OURS + "attn.{2}.{3}"),
    Rule(rf"{PACA_BLOCK}attn\.k\.{END}", PACA_OURS + "attn.kv.{2}", part=0),
    Rule(rf"{PACA_BLOCK}attn\.v\.{END}", PACA_OURS + "attn.kv.{2}", part=1),
    Rule(rf"{PACA_BLOCK}mlp\.(fc[12])\.{END}", PACA_OURS + "ffn.{2}.{3}"),
    Rule(rf"{PACA_BLOCK}mlp\.dwconv\.dwconv\.{END}", PACA_OURS + "ffn.dwconv.{2}"),
]
PACA_CONV = [
    Rule(rf"{PACA_CLUSTERING}0\.{END}", PACA_OUR_CLUSTERING + "conv.{2}"),
    Rule(rf"{PACA_CLUSTERING}2\.weight", PACA_OUR_CLUSTERING + "mix.weight", flatten=1),
    Rule(rf"{PACA_CLUSTERING}2\.bias", PACA_OUR_CLUSTERING + "mix.bias"),
    Rule(rf"{PACA_CLUSTERING}4\.weight", PACA_OUR_CLUSTERING + "assign.weight", flatten=1),
]
PACA_MLP = [
    Rule(rf"{PACA_CLUSTERING}0\.{END}", PACA_OUR_CLUSTERING + "fc.{2}"),
    Rule(rf"{PACA_CLUSTERING}2\.{END}", PACA_OUR_CLUSTERING + "assign.{2}"),
]
PACA = Family(
    models="paca_vit_*",
    layouts=[
        Layout(sign=rf"{PACA_CLUSTERING}4\.weight", rules=[*PACA_COMMON, *PACA_CONV]),
        Layout(sign=rf"{PACA_CLUSTERING}2\.bias", rules=[*PACA_COMMON, *PACA_MLP]),
    ],
)

# STViT small, base and large. A stage ends with the downsampling that here begins the next stage.
STVIT_BLOCK, STVIT_OURS = r"layers\.(\d)\.blocks\.(\d+)\.", "stages.{0}.blocks.{1}."
STVIT_RULES = [
    Rule(rf"patch_embed\.proj\.(\d+)\.{NORM_END}", "stages.0.embed.{0}.{1}"),
    Rule(rf"layers\.(\d)\.downsample\.proj\.([01])\.{NORM_END}", "stages.{0+}.embed.{1}.{2}"),
    Rule(rf"{STVIT_BLOCK}pos_embed\.conv\.{END}", STVIT_OURS + "cpe.{2}"),
    Rule(rf"{STVIT_BLOCK}norm1\.norm\.{END}", STVIT_OURS + "norm1.{2}"),
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
    Rule(rf"{STVIT_BLOCK}mlp2\.conv\.conv\.{END}", STVIT_OURS + "ffn.dwconv.{2}"),
    Rule(rf"proj\.{END}", "final.0.{0}"),
    Rule(rf"norm\.{NORM_END}", "final.1.{0}"),
    Rule(rf"head\.{END}", "head.{0}"),
]
STVIT = Family(
    models="stvit_*",
    layouts=[Layout(sign=rf"{STVIT_BLOCK}attn\.stoken_refine\.qkv\.weight", rules=STVIT_RULES)],
    options={"border": "released"},
)

FAMILIES: Mapping[str, Family] = {"paca": PACA, "stvit": STVIT}


# How the rules are applied.

WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # EMA weights first


def _unwrap(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    for key in WRAPPERS:
        if isinstance(checkpoint.get(key), Mapping):
            checkpoint = checkpoint[key]
            break
    tensors = {
        k.removeprefix("module.").removeprefix("_orig_mod."): v
        for k, v in checkpoint.items()
        if isinstance(k, str) and isinstance(v, Tensor)
    }
    if not tensors:
        keys = ", ".join(map(repr, list(checkpoint)[:5])) or "nothing"
        raise UserError(f"no tensors in the checkpoint, only {keys}; give the state dict")
    return tensors


def _select_layout(family: str, released: Mapping[str, Tensor]) -> Layout:
    for layout in FAMILIES[family].layouts:
        if any(re.fullmatch(layout.sign, name) for name in released):
            return layout
    raise UserError(
        f"not a checkpoint of {family!r}: its names, such as {next(iter(released))!r}, are different; "
        f"give one of the released files"
    )


def _rename(released: Mapping[str, Tensor], layout: Layout) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the tensors under their new names, and the old names that no rule matches."""
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


def _best_fit(family: Family, state_dict: Mapping[str, Tensor]) -> tuple[str, dict[str, torch.Size]]:
    """Returns the model that shares most names and shapes, the smallest of several, and its shapes."""
    classes = _classes(state_dict)
    candidates = {name: _shapes(name, classes) for name in list_models(family.models)}

    def fit(name: str) -> tuple[int, int]:
        shapes = candidates[name]
        common = sum(shapes.get(key) == tensor.shape for key, tensor in state_dict.items())
        return common, -len(shapes)

    best = max(candidates, key=fit)
    return best, candidates[best]


@functools.cache
def _shapes(name: str, classes: int) -> dict[str, torch.Size]:
    with torch.device("meta"):  # no values are needed
        model = create_model(name, num_classes=classes)
    return {key: tensor.shape for key, tensor in model.state_dict().items()}


def _classes(state_dict: Mapping[str, Tensor], classifier: str | Sequence[str] | None = "head") -> int:
    first = classifier if isinstance(classifier, str) else (classifier or ["head"])[0]
    weight = state_dict.get(f"{first}.weight")
    return 0 if weight is None or not weight.ndim else len(weight)


def _text(shape: torch.Size) -> str:
    return "×".join(map(str, shape))
