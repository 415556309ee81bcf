"""Boxes and masks of objects: detectors, their evaluation and pictures. Also as ``visualtokens.detect``."""

from visualtokens.tasks.detect.create import create
from visualtokens.tasks.detect.detections import Detections
from visualtokens.tasks.detect.draw import draw
from visualtokens.tasks.detect.evaluate import Evaluation, evaluate
from visualtokens.tasks.detect.predict import predict

__all__ = ["Detections", "Evaluation", "create", "draw", "evaluate", "predict"]
