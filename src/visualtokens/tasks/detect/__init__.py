"""Boxes and masks of objects: detectors, evaluation, prediction. Also ``visualtokens.detect``."""

from visualtokens.tasks.detect.detections import Detections, draw, predict
from visualtokens.tasks.detect.evaluation import Evaluation, evaluate
from visualtokens.tasks.detect.models import create

__all__ = ["Detections", "Evaluation", "create", "draw", "evaluate", "predict"]
