"""Registers model families with timm from tables of configurations."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import timm
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

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
    it per model. ``features_only`` returns ``levels`` maps.
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
    def create(pretrained: bool = False, **options: Any) -> nn.Module:
        features = dict(out_indices=tuple(range(levels)), feature_cls="getter")
        return build_model_with_cfg(build, name, pretrained, feature_cfg=features, **(config | options))

    create.__name__ = create.__qualname__ = name
    create.__module__ = module
    create.__doc__ = f"{name}: {config}"
    return create


def list_models(filter: str | Sequence[str] = "*") -> list[str]:
    """Returns the sorted names of this library's models that match ``filter``, such as ``"paca_*_32"``."""
    patterns = [filter] if isinstance(filter, str) else list(filter)
    return sorted(n for n in _names if any(fnmatch.fnmatch(n, p) for p in patterns))


create_model = timm.create_model  # with the models of this library registered
