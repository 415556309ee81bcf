"""Fewer tokens for vision transformers that exist already.

>>> visualtokens.reduce(model, "weighted_kmedoids", keep="deit_small/3")
>>> visualtokens.restore(model)
"""

import importlib
from typing import TYPE_CHECKING, Any

import visualtokens.reduce.trainable  # noqa: F401  registers reduced_vit with timm
from visualtokens.callable_package import make_callable
from visualtokens.reduce.forward import Tokens, forward_tokens
from visualtokens.reduce.methods import Pool, Seen
from visualtokens.reduce.reduction import METHODS, Place, Reduction, reduce, restore
from visualtokens.reduce.schedule import Macs, Schedule, macs, published_schedules
from visualtokens.reduce.state import Pooled, State, unmerge

if TYPE_CHECKING:
    from visualtokens.tune.planning import Plan, plan

__all__ = [
    "METHODS",
    "Macs",
    "Place",
    "Plan",
    "Pool",
    "Pooled",
    "Reduction",
    "Schedule",
    "Seen",
    "State",
    "Tokens",
    "forward_tokens",
    "macs",
    "plan",
    "published_schedules",
    "reduce",
    "restore",
    "unmerge",
]

_TUNING = ("Plan", "plan")  # imported on first use: they measure, which plain reduction does not need


def __getattr__(name: str) -> Any:
    if name in _TUNING:
        return getattr(importlib.import_module("visualtokens.tune.planning"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


make_callable(__name__, reduce)
