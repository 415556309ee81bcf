"""Fewer tokens for vision transformers that exist already.

>>> visualtokens.reduce(model, "weighted_kmedoids", keep="deit_small/3")
>>> visualtokens.restore(model)
"""

import visualtokens.reduce.registered  # noqa: F401  registers reduced_vit with timm
from visualtokens.reduce.cost import Macs, macs
from visualtokens.reduce.forward import Tokens, forward_tokens
from visualtokens.reduce.methods import Pool, Seen
from visualtokens.reduce.plan import Plan, plan
from visualtokens.reduce.reduction import METHODS, Place, Reduction, reduce, restore
from visualtokens.reduce.schedule import Schedule, published_schedules
from visualtokens.reduce.state import Pooled, State, unmerge

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
