"""Training: ``train(TrainConfig(...))`` writes a checkpoint that ``visualtokens.load`` and timm can load."""

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
