"""Training: ``train(TrainConfig(...))`` writes a checkpoint that ``visualtokens.load`` and timm can load."""

from typing import TYPE_CHECKING

from visualtokens.lazy import lazy_names

if TYPE_CHECKING:
    from visualtokens.checkpoint import load_checkpoint, pick_device, save_checkpoint
    from visualtokens.files import CannotSave
    from visualtokens.tasks import Checkpoint
    from visualtokens.train.config import TrainConfig
    from visualtokens.train.run import TrainResult, train
    from visualtokens.train.step import Diverged

__all__ = [
    "CannotSave",
    "Checkpoint",
    "Diverged",
    "TrainConfig",
    "TrainResult",
    "load_checkpoint",
    "pick_device",
    "save_checkpoint",
    "train",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "CannotSave": "visualtokens.files:",
        "Checkpoint": "visualtokens.tasks:",
        "Diverged": "visualtokens.train.step:",
        "TrainConfig": "visualtokens.train.config:",
        "TrainResult": "visualtokens.train.run:",
        "load_checkpoint": "visualtokens.checkpoint:",
        "pick_device": "visualtokens.checkpoint:",
        "save_checkpoint": "visualtokens.checkpoint:",
        "train": "visualtokens.train.run:",
    },
)
