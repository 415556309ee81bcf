"""One label per image: loss, evaluation, prediction and distillation."""

from visualtokens.tasks.classify.evaluation import (
    ClassifyEvaluation,
    evaluate,
    loss_of,
    predict,
)
from visualtokens.tasks.classify.task import Classify, ClassifyLoss, ClassifyTraining, Teacher, distillation
from visualtokens.tasks.prediction import Classification

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
