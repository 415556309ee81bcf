"""Training: ``train(TrainConfig(...))`` leaves a checkpoint that ``load_checkpoint`` and timm can load."""

from visualtokens.checkpoint import CannotSave, Checkpoint, load_checkpoint, save_checkpoint
from visualtokens.train.config import TrainConfig
from visualtokens.train.distributed import pick_device
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
