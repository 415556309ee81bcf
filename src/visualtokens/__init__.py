"""Vision transformers that see an image as a few meaningful tokens instead of a grid of patches."""

from visualtokens.explain import Explanation, explain
from visualtokens.grouping import Grouping, Tap, record_groupings
from visualtokens.models import add_vt_stage, create_model, list_models
from visualtokens.ops import set_checks

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "Grouping",
    "Tap",
    "add_vt_stage",
    "create_model",
    "explain",  # the function; the package of that name is reached by `from visualtokens.explain import …`
    "list_models",
    "record_groupings",
    "set_checks",
]
