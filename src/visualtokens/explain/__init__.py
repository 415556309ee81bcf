"""Which regions of an image the tokens represent, and which of them a prediction depends on.

>>> explanation = explain(model, image)
>>> explanation.save("why.html")
"""

from visualtokens.callable_package import make_callable
from visualtokens.explain.baselines import METHODS, Setting
from visualtokens.explain.explainer import explain
from visualtokens.explain.explanation import Explanation
from visualtokens.explain.faithfulness import Faithfulness, FaithfulnessEvaluator, Score, gather
from visualtokens.explain.gallery import Gallery, explain_folder
from visualtokens.explain.html import Origin
from visualtokens.explain.layers import Layer
from visualtokens.explain.render import overlay

__all__ = [
    "METHODS",
    "Explanation",
    "Faithfulness",
    "FaithfulnessEvaluator",
    "Gallery",
    "Layer",
    "Origin",
    "Score",
    "Setting",
    "explain",
    "explain_folder",
    "gather",
    "overlay",
]

make_callable(__name__, explain)
