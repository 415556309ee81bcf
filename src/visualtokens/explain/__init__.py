"""Which regions of an image the tokens represent, and which of them a prediction depends on.

>>> explanation = explain(model, image)
>>> explanation.save("why.html")
"""

from visualtokens.callable_package import make_callable
from visualtokens.explain.baselines import METHODS, Setting
from visualtokens.explain.explainer import explain, explain_subject
from visualtokens.explain.explanation import Explanation
from visualtokens.explain.faithfulness import Faithfulness, FaithfulnessEvaluator, Score, gather
from visualtokens.explain.gallery import Gallery, explain_folder, explain_images
from visualtokens.explain.html import Origin
from visualtokens.explain.layers import Layer, layers_of
from visualtokens.explain.render import overlay
from visualtokens.explain.subject import Subject
from visualtokens.explain.view import token_view, view_document, view_frame

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
    "Subject",
    "explain",
    "explain_folder",
    "explain_images",
    "explain_subject",
    "gather",
    "layers_of",
    "overlay",
    "token_view",
    "view_document",
    "view_frame",
]

make_callable(__name__, explain)
