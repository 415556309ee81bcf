"""Vision transformers that see an image as a few meaningful tokens instead of a grid of patches."""

import importlib
from typing import Any

from visualtokens.convert import Converted, convert
from visualtokens.explain import Explanation, explain
from visualtokens.fuse import fuse, unfuse
from visualtokens.grouping import Grouping, Tap, record_groupings
from visualtokens.layers import set_clusters
from visualtokens.models import add_vt_stage, create_model, list_models
from visualtokens.ops import set_checks
from visualtokens.reduce import plan, reduce, restore, unmerge

__version__ = "0.1.0"

_TASKS = ("detect", "segment")  # modules that are imported when somebody asks for them

# `convert`, `explain`, `reduce` are functions here; `from visualtokens.explain import …` reaches the package.
__all__ = [
    "Converted",
    "Explanation",
    "Grouping",
    "Tap",
    "add_vt_stage",
    "convert",
    "create_model",
    "explain",
    "fuse",
    "list_models",
    "plan",
    "record_groupings",
    "reduce",
    "restore",
    "set_checks",
    "set_clusters",
    "unfuse",
    "unmerge",
]


def __getattr__(name: str) -> Any:
    if name in _TASKS:
        return importlib.import_module(f"visualtokens.tasks.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
