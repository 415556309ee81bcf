"""Vision transformers that see an image as a few meaningful tokens instead of a grid of patches."""

import sys
from typing import TYPE_CHECKING

from visualtokens.lazy import lazy_names

if TYPE_CHECKING:
    from visualtokens.checkpoint import load
    from visualtokens.converters import Converted, convert
    from visualtokens.explain import Explanation, explain
    from visualtokens.export import export
    from visualtokens.grouping import Grouping, Tap, record_groupings
    from visualtokens.hub import push_to_hub
    from visualtokens.models import add_vt_stage, create_model, list_models
    from visualtokens.ops import set_checks
    from visualtokens.reduce import compress, plan, reduce, restore, unmerge
    from visualtokens.surgery import fuse, set_clusters, unfuse
    from visualtokens.tasks import detect, segment

__version__ = "0.1.0"

__all__ = [
    "Converted",
    "Explanation",
    "Grouping",
    "Tap",
    "add_vt_stage",
    "compress",
    "convert",
    "create_model",
    "detect",
    "explain",
    "export",
    "fuse",
    "list_models",
    "load",
    "plan",
    "push_to_hub",
    "record_groupings",
    "reduce",
    "restore",
    "segment",
    "set_checks",
    "set_clusters",
    "unfuse",
    "unmerge",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Converted": "visualtokens.converters:",
        "Explanation": "visualtokens.explain:",
        "Grouping": "visualtokens.grouping:",
        "Tap": "visualtokens.grouping:",
        "add_vt_stage": "visualtokens.models:",
        "compress": "visualtokens.reduce:",
        "convert": "visualtokens.converters:",
        "create_model": "visualtokens.models:",
        "detect": "visualtokens.tasks.detect",
        "explain": "visualtokens.explain",
        "export": "visualtokens.export",
        "fuse": "visualtokens.surgery:",
        "list_models": "visualtokens.models:",
        "load": "visualtokens.checkpoint:",
        "plan": "visualtokens.tune.planning:",
        "push_to_hub": "visualtokens.hub:",
        "record_groupings": "visualtokens.grouping:",
        "reduce": "visualtokens.reduce",
        "restore": "visualtokens.reduce:",
        "segment": "visualtokens.tasks.segment",
        "set_checks": "visualtokens.ops:",
        "set_clusters": "visualtokens.surgery:",
        "unfuse": "visualtokens.surgery:",
        "unmerge": "visualtokens.reduce:",
    },
)


def register_models() -> None:
    """Register the models of this library with timm."""
    import visualtokens.models
    import visualtokens.reduce.trainable  # noqa: F401


def _is_command() -> bool:
    """Whether this process is ``vtok``, or Python is about to run ``python -m visualtokens``."""
    if getattr(sys.modules.get("vtok"), "running", False):
        return True
    words = sys.orig_argv
    # While Python looks for the module, sys.argv[0] is "-m".
    searching = sys.argv[:1] == ["-m"] and "-m" in words
    return searching and words[words.index("-m") + 1].partition(".")[0] == __name__


# timm must know the models of a program that imports this library. The command `vtok` registers them when it
# runs a verb: its help and its error messages need neither timm nor torch.
if not _is_command():
    register_models()
