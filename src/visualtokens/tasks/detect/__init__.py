"""Boxes and masks of objects: detectors, evaluation, prediction. Also ``visualtokens.detect``."""

from visualtokens.tasks.detect.create import create
from visualtokens.tasks.detect.detections import Detections, draw, predict
from visualtokens.tasks.detect.evaluate import Evaluation, evaluate

__all__ = ["Detections", "Evaluation", "create", "draw", "evaluate", "predict"]
