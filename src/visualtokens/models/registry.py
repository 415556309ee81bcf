"""Registers model families with timm from tables of configurations."""

from __future__ import annotations

import fnmatch
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import timm
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from visualtokens.errors import UserError
from visualtokens.models.released import rename_released

ImageSize = int | Sequence[int]  # the side of a square image, or (height, width)

_names: list[str] = []

# timm's pretrained_cfg for ImageNet models; a family states only its differences.
IMAGENET: dict[str, Any] = dict(
    num_classes=1000,
    input_size=(3, 224, 224),
    pool_size=(7, 7),
    crop_pct=0.9,
    interpolation="bicubic",
    mean=IMAGENET_DEFAULT_MEAN,
    std=IMAGENET_DEFAULT_STD,
    classifier="head",
    fixed_input_size=False,
)


def register_family(
    module: str,
    build: Callable[..., nn.Module],
    configs: Mapping[str, Mapping[str, Any]],
    *,
    default_cfg: Mapping[str, Any],
    default_cfgs: Mapping[str, Mapping[str, Any]] | None = None,
    levels: int = 4,
) -> None:
    """Registers every entry of ``configs`` as a model for ``timm.create_model``.

    ``module`` is the ``__name__`` of the family's file, ``build`` its constructor. ``default_cfg`` overrides
    :data:`IMAGENET`, at least with the name of the first layer (``first_conv``); ``default_cfgs`` overrides
    it per model. ``features_only`` returns ``levels`` maps. ``img_size`` becomes the ``input_size`` of the
    model's ``pretrained_cfg``, and is passed to a constructor that has this argument.
    """
    overrides = default_cfgs or {}
    cfgs = {name: IMAGENET | dict(default_cfg) | dict(overrides.get(name, {})) for name in configs}
    # timm's decorator reads `default_cfgs` from the module of the function it registers.
    home = sys.modules[module]
    home.default_cfgs = generate_default_cfgs(cfgs)  # type: ignore[attr-defined]
    for name, config in configs.items():
        register_model(_entrypoint(module, name, build, dict(config), levels))
        _names.append(name)


def _entrypoint(
    module: str, name: str, build: Callable[..., nn.Module], config: dict[str, Any], levels: int
) -> Callable[..., nn.Module]:
    sized = "img_size" in inspect.signature(build).parameters

    def create(pretrained: bool = False, *, img_size: ImageSize | None = None, **options: Any) -> nn.Module:
        features = dict(out_indices=tuple(range(levels)), feature_cls="getter")
        given: dict[str, Any] = dict(feature_cfg=features, pretrained_filter_fn=rename_released)
        if img_size is None:
            return build_model_with_cfg(build, name, pretrained, **given, **(config | options))
        own = config | options | (dict(img_size=img_size) if sized else {})
        model = build_model_with_cfg(build, name, pretrained, **given, **own)
        if "input_size" not in (options.get("pretrained_cfg_overlay") or {}):
            record_size(model, check_size(img_size))
        return model

    create.__name__ = create.__qualname__ = name
    create.__module__ = module
    create.__doc__ = f"{name}: {config}"
    return create


def check_size(img_size: object, *, least: int = 1) -> tuple[int, int]:
    """Returns ``img_size`` as (height, width); raises unless both are whole numbers of at least ``least``."""
    sides = tuple(img_size) if isinstance(img_size, Sequence) else (img_size, img_size)
    whole = [int(side) for side in sides if isinstance(side, Integral) and not isinstance(side, bool)]
    if len(sides) != 2 or len(whole) != 2 or min(whole) < least:
        raise UserError(
            f"img_size={img_size!r}; give the side of a square image in pixels, such as 224, or (height, "
            f"width), at least {least} each"
        )
    return whole[0], whole[1]


def record_size(model: nn.Module, size: tuple[int, int]) -> None:
    """Makes ``size`` (H, W) the input size of a model's configuration, which timm's data loaders read."""
    for part in (model, getattr(model, "model", None)):  # features_only wraps the model
        cfg: Any = getattr(part, "pretrained_cfg", None)
        if cfg is None:
            continue
        channels, *before = cfg.get("input_size") or (3, *size)
        if cfg.get("pool_size"):
            sides = zip(size, cfg["pool_size"], before, strict=True)
            cfg["pool_size"] = tuple(math.ceil(new * pool / old) for new, pool, old in sides)
        cfg["input_size"] = (channels, *size)


class AnySize:
    """``set_input_size`` of models whose layers do not depend on the size of the images."""

    def set_input_size(
        self, img_size: ImageSize | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Changes the input size in ``pretrained_cfg``; the model takes images of any size.

        Arguments as of timm's vision transformers. There are no patches to resize, so ``patch_size`` must be
        None.
        """
        if patch_size is not None:
            raise UserError(
                f"patch_size={patch_size}: the stem of {type(self).__name__} is built for one stride; "
                "leave patch_size out"
            )
        if img_size is not None:
            record_size(self, check_size(img_size))  # type: ignore[arg-type]


def list_models(filter: str | Sequence[str] = "*") -> list[str]:
    """Returns the sorted names of this library's models that match ``filter``, such as ``"paca_*_32"``."""
    patterns = [filter] if isinstance(filter, str) else list(filter)
    return sorted(n for n in _names if any(fnmatch.fnmatch(n, p) for p in patterns))


create_model = timm.create_model  # with the models of this library registered
