"""One class per pixel: models, loss, evaluation, inference and pictures. Also ``visualtokens.segment``."""

from visualtokens.tasks.segment.evaluation import SegmentEvaluation, SegmentLoss, evaluate, loss_of
from visualtokens.tasks.segment.inference import Inference, predict
from visualtokens.tasks.segment.models import Segmenter, create
from visualtokens.tasks.segment.pictures import index_image, overlay, palette, save_prediction

__all__ = [
    "Inference",
    "SegmentEvaluation",
    "SegmentLoss",
    "Segmenter",
    "create",
    "evaluate",
    "index_image",
    "loss_of",
    "overlay",
    "palette",
    "predict",
    "save_prediction",
]
