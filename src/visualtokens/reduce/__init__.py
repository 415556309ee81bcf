"""Fewer tokens for existing vision transformers.

>>> visualtokens.reduce(model, "weighted_kmedoids", keep="deit_small/3")
>>> visualtokens.restore(model)
"""

from typing import TYPE_CHECKING

import visualtokens.reduce.trainable  # noqa: F401  registers reduced_vit with timm
from visualtokens.callable_package import make_callable
from visualtokens.lazy import lazy_names
from visualtokens.reduce.compression import Compressed, compress
from visualtokens.reduce.forward import Tokens, forward_tokens
from visualtokens.reduce.methods import METHODS, Place, Pool, Pooled, Seen, register_method
from visualtokens.reduce.reduction import AS_PUBLISHED, Reduction, reduce, restore
from visualtokens.reduce.schedule import Macs, Schedule, macs, published_schedules
from visualtokens.reduce.state import State, unmerge

if TYPE_CHECKING:
    from visualtokens.tune.planning import Plan, plan

__all__ = [
    "AS_PUBLISHED",
    "METHODS",
    "Compressed",
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
    "compress",
    "forward_tokens",
    "macs",
    "plan",
    "published_schedules",
    "reduce",
    "register_method",
    "restore",
    "unmerge",
]

# Plain reduction does not need the benchmarking modules.
__getattr__, _ = lazy_names(
    __name__, {"Plan": "visualtokens.tune.planning:", "plan": "visualtokens.tune.planning:"}
)


def __dir__() -> list[str]:
    return sorted(__all__)


make_callable(__name__, reduce)
