"""Training: ``train(TrainConfig(...))`` leaves a checkpoint that ``load_checkpoint`` and timm can load."""

from visualtokens.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from visualtokens.train.config import TrainConfig
from visualtokens.train.device import pick_device
from visualtokens.train.files import CannotSave
from visualtokens.train.loop import train
from visualtokens.train.result import TrainResult
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
