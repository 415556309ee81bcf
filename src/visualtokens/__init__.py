"""Vision transformers that see an image as a few meaningful tokens instead of a grid of patches."""

import importlib
from typing import TYPE_CHECKING, Any

from visualtokens.converters import Converted, convert
from visualtokens.explain import Explanation
from visualtokens.grouping import Grouping, Tap, record_groupings
from visualtokens.models import add_vt_stage, create_model, list_models
from visualtokens.ops import set_checks
from visualtokens.reduce import restore, unmerge
from visualtokens.surgery import fuse, set_clusters, unfuse

if TYPE_CHECKING:  # at run time these two are packages that can be called
    from visualtokens.checkpoint import load
    from visualtokens.explain import explain
    from visualtokens.reduce import plan, reduce
    from visualtokens.tasks import detect, segment
else:
    from visualtokens import explain, reduce

__version__ = "0.1.0"

# Imported on first use, because they bring in more than most programs need.
_LAZY = {
    "detect": "visualtokens.tasks.detect",
    "load": "visualtokens.checkpoint:load",
    "plan": "visualtokens.tune.planning:plan",
    "segment": "visualtokens.tasks.segment",
}

__all__ = [
    "Converted",
    "Explanation",
    "Grouping",
    "Tap",
    "add_vt_stage",
    "convert",
    "create_model",
    "detect",
    "explain",
    "fuse",
    "list_models",
    "load",
    "plan",
    "record_groupings",
    "reduce",
    "restore",
    "segment",
    "set_checks",
    "set_clusters",
    "unfuse",
    "unmerge",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, member = _LAZY[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, member) if member else found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
