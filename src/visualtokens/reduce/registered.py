"""A reduced vision transformer under a name of its own, so that it can be trained, saved and loaded.

>>> timm.create_model("reduced_vit", base="deit_small_patch16_224", method="kmedoids", keep="deit_small/3")

A checkpoint of it names the reduction in its ``model_args``, so whoever loads it gets the reduced model. The
weights are those of the base under the same names: a run can start from a checkpoint of the base.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from visualtokens.errors import UserError, unknown
from visualtokens.reduce.extraction import PACE, soft_extraction
from visualtokens.reduce.methods import Init
from visualtokens.reduce.reduction import METHODS, reduce
from visualtokens.reduce.schedule import Keep

NAME = "reduced_vit"
SOFT = "soft"  # the method of the search
BASE = "deit_small_patch16_224"
# What a reduced model has of its base: how images are prepared, how its first and last weights are called.
INHERITED = (
    *("input_size", "mean", "std", "crop_pct", "interpolation", "fixed_input_size"),
    *("first_conv", "classifier", "license"),
)

default_cfgs = generate_default_cfgs({NAME: dict(input_size=(3, 224, 224), fixed_input_size=True)})


@register_model
def reduced_vit(pretrained: bool = False, *, base: str = BASE, **options: Any) -> nn.Module:
    """The model ``base`` of timm with ``method`` and ``keep`` of :func:`visualtokens.reduce`.

    The other options are those of the base. ``pretrained=True`` takes the base's pretrained weights.
    """
    if not timm.is_model(base):
        raise unknown("base", base, timm.list_models("*vit*"))
    cfg = timm.get_pretrained_cfg(base)
    given = options.pop("pretrained_cfg_overlay", None) or {}
    inherited = {name: getattr(cfg, name) for name in INHERITED} if cfg else {}
    if pretrained and not options.get("pretrained_cfg"):
        options["pretrained_cfg"] = cfg
    return build_model_with_cfg(
        partial(_build, base),
        NAME,
        pretrained,
        pretrained_cfg_overlay=inherited | given | {"architecture": NAME},
        feature_cfg=dict(out_indices=3, feature_cls="getter"),
        **options,
    )


def _build(
    base: str,
    *,
    method: str = "weighted_kmedoids",
    keep: Keep = "deit_small/3",
    carry: bool = False,
    init: Init = "distinct",
    iterations: int | None = None,
    price: float | None = None,
    pace: float = PACE,
    **options: Any,
) -> nn.Module:
    """``price`` and ``pace`` are for the method ``"soft"``, which learns what to keep."""
    if (price is None) == (method == SOFT):
        raise UserError(f"price={price} with method={method!r}; give it with method='soft', and only then")
    model = timm.create_model(base, **options)
    if price is not None:
        return reduce(model, soft_extraction(price=price, pace=pace), keep=1.0, carry=False)
    if method not in METHODS:
        raise unknown("method", method, [*METHODS, SOFT])
    return reduce(model, method, keep=keep, carry=carry, init=init, iterations=iterations)
