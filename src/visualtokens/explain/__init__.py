"""Which regions the tokens stand for, and which of them mattered.

>>> explanation = explain(model, image)
>>> explanation.save("why.html")
"""

from visualtokens.explain.explainer import explain
from visualtokens.explain.explanation import Explanation
from visualtokens.explain.faithfulness import Faithfulness, Judge, Score, gather
from visualtokens.explain.gallery import Gallery, explain_folder
from visualtokens.explain.layers import Layer, compose
from visualtokens.explain.render import overlay
from visualtokens.explain.report import Report, Sample, write_report
from visualtokens.explain.saliency import METHODS, Setting

__all__ = [
    "METHODS",
    "Explanation",
    "Faithfulness",
    "Gallery",
    "Judge",
    "Layer",
    "Report",
    "Sample",
    "Score",
    "Setting",
    "compose",
    "explain",
    "explain_folder",
    "gather",
    "overlay",
    "write_report",
]
