"""One label per image: loss, evaluation, prediction and distillation."""

from visualtokens.tasks.classify.evaluation import (
    Classification,
    ClassifyEvaluation,
    evaluate,
    loss_of,
    predict,
)
from visualtokens.tasks.classify.task import Classify, ClassifyLoss, ClassifyTraining, Teacher, distillation

__all__ = [
    "Classification",
    "Classify",
    "ClassifyEvaluation",
    "ClassifyLoss",
    "ClassifyTraining",
    "Teacher",
    "distillation",
    "evaluate",
    "loss_of",
    "predict",
]
