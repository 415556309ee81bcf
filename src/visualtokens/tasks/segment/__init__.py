"""One class per pixel: models, loss, evaluation, inference and pictures. Also ``visualtokens.segment``."""

from typing import TYPE_CHECKING

from visualtokens.lazy import lazy_names

if TYPE_CHECKING:
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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Inference": "visualtokens.tasks.segment.inference:",
        "SegmentEvaluation": "visualtokens.tasks.segment.evaluation:",
        "SegmentLoss": "visualtokens.tasks.segment.evaluation:",
        "Segmenter": "visualtokens.tasks.segment.models:",
        "create": "visualtokens.tasks.segment.models:",
        "evaluate": "visualtokens.tasks.segment.evaluation:",
        "index_image": "visualtokens.tasks.segment.pictures:",
        "loss_of": "visualtokens.tasks.segment.evaluation:",
        "overlay": "visualtokens.tasks.segment.pictures:",
        "palette": "visualtokens.tasks.segment.pictures:",
        "predict": "visualtokens.tasks.segment.inference:",
        "save_prediction": "visualtokens.tasks.segment.pictures:",
    },
)
