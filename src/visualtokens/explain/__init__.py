"""Which regions the tokens stand for, and which of them mattered.

>>> explanation = explain(model, image)
>>> explanation.save("why.html")
"""

from visualtokens.explain.explainer import explain
from visualtokens.explain.explanation import Explanation
from visualtokens.explain.render import overlay
from visualtokens.explain.report import Report, Sample, write_report

__all__ = ["Explanation", "Report", "Sample", "explain", "overlay", "write_report"]
