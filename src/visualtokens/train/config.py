"""Everything a training run depends on, as one dataclass: the options of ``vtok train``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from visualtokens.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train an image classifier and save it as a folder that timm, ``vtok eval`` and others can load."""

    model: str
    """Name of the model: one of `vtok models`, or any other model of timm."""

    data: str
    """Images to learn from: digits, digit_scenes, folder:PATH or npz:FILE."""

    out: str
    """Folder for the result: the model, its settings, the log, and what is needed to resume."""

    epochs: int = 10
    """How many times to go through the training images."""

    seed: int = 0
    """Start of every random choice; the same seed gives the same model on the same machine."""

    batch: int = 64
    """Images per step."""

    size: int | None = None
    """Side of the square images the model sees, in pixels; by default the model's own input size."""

    augment: str | None = None
    """How training images are varied: none, digits or photo.
    By default digits for digits, else photo."""

    lr: float = 1e-3
    """Highest learning rate of AdamW; it falls along half a cosine."""

    min_lr: float = 1e-6
    """Learning rate at the start of the warm-up and at the very end."""

    warmup_epochs: float | None = None
    """Epochs in which the learning rate rises; by default a tenth of all, at most 5."""

    weight_decay: float = 0.05
    """Decay of the weights; biases, norms and what the model exempts are left alone."""

    label_smoothing: float = 0.1
    """How much of each label is spread over the other classes."""

    clip: float = 1.0
    """Largest norm of the gradient, larger ones are scaled down; 0 clips nothing."""

    workers: int = 0
    """Processes that prepare images; 0 prepares them in the training process."""

    device: str = "auto"
    """Where to compute: auto (a GPU if there is one), cpu, cuda, cuda:1, mps."""

    bf16: bool = False
    """Compute in bfloat16 where it is safe (automatic mixed precision)."""

    channels_last: bool = False
    """Keep images and convolutions in channels-last memory order, which is often faster."""

    model_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model, such as --model_args.drop_path_rate 0.1."""

    overwrite: bool = False
    """Replace a run that the folder already holds."""

    resume: bool = False
    """Continue the run that the folder holds, from its last whole epoch. Give the other options again."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        _require(self, "size", self.size is None or self.size >= 1, "at least 1")
        for name in ("seed", "workers"):
            _require(self, name, getattr(self, name) >= 0, "at least 0")
        _require(self, "lr", 0 < self.lr < math.inf, "more than 0")
        for name in ("min_lr", "weight_decay", "clip"):
            _require(self, name, 0 <= getattr(self, name) < math.inf, "at least 0")
        _require(self, "min_lr", self.min_lr <= self.lr, f"at most the learning rate, lr={self.lr}")
        _require(self, "label_smoothing", 0 <= self.label_smoothing < 1, "at least 0 and less than 1")
        _require(self, "warmup_epochs", 0 <= self.warmup <= self.epochs, f"from 0 to epochs={self.epochs}")
        if self.overwrite and self.resume:
            raise UserError("overwrite and resume exclude each other; give one of them")

    @property
    def warmup(self) -> float:
        """Epochs of warm-up, with the default filled in."""
        return min(5.0, self.epochs / 10) if self.warmup_epochs is None else self.warmup_epochs


def _require(config: TrainConfig, name: str, holds: bool, bounds: str) -> None:
    if not holds:
        raise UserError(f"{name}={getattr(config, name)} must be {bounds}")
