"""Converts released checkpoints, and those of timm, into checkpoint folders of this library."""

from __future__ import annotations

import functools
import math
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import save_for_hf
from torch import Tensor

from visualtokens.errors import UserError, unknown
from visualtokens.files import CONFIG, WEIGHTS, check_finite, read_tensors, write_atomically
from visualtokens.models import create_model
from visualtokens.models.released import compare, rename
from visualtokens.models.released_names import FAMILIES, Layout


@dataclass(frozen=True)
class Converted:
    """A checkpoint with this library's parameter names, and the differences to the matching model."""

    state_dict: dict[str, Tensor]
    model: str  # the registered model that matches best
    classes: int  # of the classifier; 0 if the checkpoint has none
    options: dict[str, Any]  # arguments of create_model that reproduce the released model's outputs
    unknown: list[str]  # names in the checkpoint that no rule matches or that the model does not have
    missing: list[str]  # names of the model that the checkpoint lacks
    misfits: list[str]  # names with different shapes in checkpoint and model, with both shapes
    cfg: dict[str, Any] = field(default_factory=dict)  # the preprocessing, where it is not the model's own

    @property
    def complete(self) -> bool:
        """Whether checkpoint and model have the same names and shapes."""
        return not (self.unknown or self.missing or self.misfits)

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint folder for :func:`visualtokens.load`, which names ImageNet's classes."""
        if not self.complete:
            first = [*self.misfits, *self.missing, *self.unknown][0]
            count = len(self.misfits) + len(self.missing) + len(self.unknown)
            raise UserError(f"{count} weights differ from those of {self.model!r}, the first is {first}")
        if not self.classes:
            raise UserError(f"the checkpoint of {self.model!r} has no classifier; give one that has")
        model = create_model(
            self.model, num_classes=self.classes, pretrained_cfg_overlay=self.cfg, **self.options
        )
        model.load_state_dict({name: tensor.contiguous() for name, tensor in self.state_dict.items()})
        out = Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            save_for_hf(model, temporary, model_args=self.options, safe_serialization=True)
            for name in (WEIGHTS, CONFIG):
                write_atomically(out / name, functools.partial(shutil.copyfile, Path(temporary, name)))


def convert(
    checkpoint: Mapping[str, Any] | str | Path, family: str, *, model: str | None = None
) -> Converted:
    """Renames the parameters of a released checkpoint and finds the model that they fit.

    >>> found = visualtokens.convert("pacavit_small.pth", "paca")
    >>> model = visualtokens.create_model(found.model, num_classes=found.classes, **found.options)
    >>> model.load_state_dict(found.state_dict)

    ``family`` is ``"paca"``, ``"stvit"``, ``"deit"``, ``"pvt_v2"``, ``"swin"``, ``"torchvision"`` (ResNet,
    ViT and Swin), or the name of a timm model whose names the checkpoint has. ``model`` is the model to fit
    instead of the one that fits best. ``checkpoint`` is a .pth or .safetensors file, of which no pickled code
    is run, or a state dict, plain or as training scripts save it: inside ``{"model": …}`` or
    ``{"state_dict": …}``, with ``module.`` or ``_orig_mod.`` before each name; EMA weights are preferred. If
    :attr:`Converted.complete` is False, its ``unknown``, ``missing`` and ``misfits`` list the differences.
    :meth:`Converted.save` writes a checkpoint folder. The weights themselves are not part of this library.
    """
    if family not in FAMILIES and not timm.is_model(family):
        raise unknown("family of checkpoints", family, FAMILIES)
    if model is not None and not timm.is_model(model):
        raise unknown("model", model, timm.list_models())
    if isinstance(checkpoint, str | Path):
        released = read_checkpoint(checkpoint)
    else:
        released = _unwrap(checkpoint)
        check_finite(released, "the checkpoint")
    if family in FAMILIES:
        layout = _select_layout(family, released)
    else:
        cfg = timm.get_pretrained_cfg(family)
        layout = Layout("", [family], classifier=_first(cfg.classifier if cfg else None))
    state_dict, unmatched = rename(released, layout)
    classes = _classes(state_dict, layout.classifier)
    options, overlay = dict(layout.options), dict(layout.cfg)
    if layout.resizable and (size := _image_size(state_dict)) not in (None, 224):
        options["img_size"] = size
        overlay |= dict(input_size=(3, size, size), crop_pct=1.0)
    names = timm.list_models(list(layout.models)) if family in FAMILIES else [family]
    best, shapes = _best_fit([model] if model else names, state_dict, classes, options.get("img_size"))
    found = compare(state_dict, shapes, model=best, unmatched=unmatched)
    return Converted(
        state_dict=state_dict,
        model=best,
        classes=classes,
        options=options,
        unknown=found.unknown,
        missing=found.missing,
        misfits=found.misfits,
        cfg=overlay,
    )


def released_model(released: Mapping[str, Tensor], layout: Layout) -> str:
    """Returns the name of the model that released weights of this layout fit best."""
    state_dict, _ = rename(released, layout)
    names = timm.list_models(list(layout.models))
    return _best_fit(names, state_dict, _classes(state_dict, layout.classifier), None)[0]


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """Returns the finite weights of a .safetensors file or of a .pth file, of which no pickled code is run.

    The weights may be wrapped as training scripts save them; see :func:`convert`.
    """
    weights = _unwrap(read_tensors(Path(path)))
    check_finite(weights, path)
    return weights


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
    for layout in FAMILIES[family]:
        if layout.fits(released):
            return layout
    raise UserError(
        f"not a checkpoint of {family!r}: its names, such as {next(iter(released))!r}, are different; "
        f"give one of the released files"
    )


def _best_fit(
    names: Iterable[str], state_dict: Mapping[str, Tensor], classes: int, size: int | None
) -> tuple[str, dict[str, torch.Size]]:
    """Returns the model that shares most names and shapes, the smallest of several, and its shapes."""
    candidates = {name: _shapes(name, classes, size) for name in names}

    def fit(name: str) -> tuple[int, int]:
        shapes = candidates[name]
        common = sum(shapes.get(key) == tensor.shape for key, tensor in state_dict.items())
        return common, -len(shapes)

    best = max(candidates, key=fit)
    return best, candidates[best]


@functools.cache
def _shapes(name: str, classes: int, size: int | None) -> dict[str, torch.Size]:
    sized = {} if size is None else {"img_size": size}
    with torch.device("meta"):  # no values are needed
        model = create_model(name, num_classes=classes, **sized)
    return {key: tensor.shape for key, tensor in model.state_dict().items()}


def _image_size(state_dict: Mapping[str, Tensor]) -> int | None:
    """Returns the side of the square images that the position embeddings of a ViT are for."""
    positions, patches = state_dict.get("pos_embed"), state_dict.get("patch_embed.proj.weight")
    if positions is None or patches is None or positions.ndim != 3 or patches.ndim != 4:
        return None
    side = math.isqrt(max(0, positions.shape[1] - 1))
    size = side * patches.shape[-1]
    return size if side * side == positions.shape[1] - 1 and 0 < size <= MAX_SIDE else None


MAX_SIDE = 4096  # pixels


def _first(classifier: str | Sequence[str] | None) -> str:
    return classifier if isinstance(classifier, str) else (classifier or ["head"])[0]


def _classes(state_dict: Mapping[str, Tensor], classifier: str) -> int:
    weight = state_dict.get(f"{classifier}.weight")
    return 0 if weight is None or not weight.ndim else len(weight)
