"""Classifiers of timm's registry: making one, its preprocessing, and describing it for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import timm
from torch import nn

import visualtokens.models as _registers_our_models  # noqa: F401
from visualtokens.data import Preprocess
from visualtokens.errors import UserError, unknown

# Arguments of timm.create_model that fetch or unpickle files: nothing a checkpoint's config may ask for.
_RESERVED = ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
_PREPROCESSING = ("input_size", "mean", "std", "crop_pct", "interpolation")
FIRST_WEIGHTS = "init_from"  # reads another file: nothing that a checkpoint may ask for
# Of timm's pretrained_cfg; the rest tells of somebody else's weights: where they are, their labels, licence.
_DESCRIBES_MODEL = ("interpolation", "pool_size", "first_conv", "classifier", "fixed_input_size")


def build_model(
    name: str, *, classes: int, model_args: Mapping[str, Any], cfg: Mapping[str, Any] | None = None
) -> nn.Module:
    """A model of timm's registry, which holds ours, with fresh weights.

    ``cfg`` overrides what the model's configuration says about preprocessing; the rest of it is ignored.
    """
    if not timm.is_model(name):
        raise unknown("model", name, timm.list_models())
    for reserved in _RESERVED:
        if reserved in model_args:
            raise UserError(f"model_args may not hold {reserved!r}; leave it out")
    if "num_classes" in model_args:
        raise UserError("model_args may not hold 'num_classes'; the data decides it")
    overlay = {key: value for key, value in (cfg or {}).items() if key in _PREPROCESSING}
    try:
        return timm.create_model(name, num_classes=classes, pretrained_cfg_overlay=overlay, **model_args)
    except TypeError as error:  # an argument that the model does not have
        raise UserError(f"model {name!r} refuses model_args={dict(model_args)}: {error}") from error


def sized_args(name: str, model_args: Mapping[str, Any], *, size: int | None) -> dict[str, Any]:
    """``model_args``, with the image size for those models of timm that are built for one size only."""
    cfg = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    fixed = cfg is not None and cfg.fixed_input_size
    return {**model_args, "img_size": size} if size and fixed else dict(model_args)


def preprocess_for(model: nn.Module, *, size: int | None = None) -> Preprocess:
    """What the model expects of an image, by its timm configuration; ``size`` overrides the input size."""
    cfg = timm_cfg(model)
    height, width = (size, size) if size else cfg["input_size"][-2:]
    return Preprocess((height, width), tuple(cfg["mean"]), tuple(cfg["std"]), crop=cfg["crop_pct"] or 1.0)


def timm_cfg(model: nn.Module) -> dict[str, Any]:
    """What timm knows about a model besides its weights."""
    return cast(dict[str, Any], model.pretrained_cfg)


def describe_classifier(
    model: nn.Module, *, classes: Sequence[str], preprocess: Preprocess, model_args: Mapping[str, Any]
) -> dict[str, Any]:
    """What the Hub's ``config.json`` says about a model that was built with ``model_args``.

    Where its first weights came from (``init_from``) is no part of the model.
    """
    cfg = timm_cfg(model)
    kept = {name: cfg[name] for name in _DESCRIBES_MODEL if name in cfg}
    seen = {
        "input_size": (3, *preprocess.size),
        "mean": preprocess.mean,
        "std": preprocess.std,
        "crop_pct": preprocess.crop,
    }
    return {
        "architecture": cfg["architecture"],
        "num_classes": len(classes),
        "num_features": model.num_features,
        "label_names": list(classes),
        "model_args": {name: value for name, value in model_args.items() if name != FIRST_WEIGHTS},
        "pretrained_cfg": kept | seen | {"num_classes": len(classes)},
    }
