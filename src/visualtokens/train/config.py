"""The options of a training run, those of ``vtok train``, and their checks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from visualtokens.errors import UserError, unknown
from visualtokens.tasks.options import TaskOptions

SCHEDULES = ("cosine", "step", "poly")
LOGS = ("tensorboard", "trackio", "wandb")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TaskOptions):
    """Train a model and save it as a folder that ``visualtokens.load``, `vtok eval` and timm can load."""

    out: str
    """Output folder: the model, its configuration, logs, and snapshots to resume from."""

    epochs: int = 10
    """Number of passes over the training images."""

    seed: int = 0
    """Random seed; the same seed gives the same model on the same machine."""

    batch: int = 64
    """Images per step, over all processes."""

    accumulate: int = 1
    """Split each step into this many parts and accumulate their gradients; saves memory."""

    optimizer: str = "adamw"
    """timm optimizer: adamw, nesterov (SGD), rmsproptf, lamb and others."""

    optimizer_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer, such as --optimizer_args.momentum 0.9."""

    lr: float = 1e-3
    """Peak learning rate."""

    schedule: Literal["cosine", "step", "poly"] = "cosine"
    """Learning rate schedule after the warm-up: cosine, step or polynomial decay; see --power."""

    min_lr: float | None = None
    """Final learning rate of cosine and poly; by default 1e-6, or lr / 10 if that is less."""

    power: float | None = None
    """Power of --schedule poly; by default 1, a linear decay."""

    decay_epochs: float | list[float] | None = None
    """Epochs between two decays of --schedule step, by default 30, or the epochs of all decays, such as
    [8, 11]."""

    decay_rate: float | None = None
    """Factor of each decay of --schedule step; by default 0.1."""

    warmup_epochs: float | None = None
    """Epochs of linear warm-up; by default a tenth of all, at most 5."""

    warmup_lr: float | None = None
    """Initial learning rate of the warm-up; by default 1e-6, or lr / 10 if that is less."""

    weight_decay: float | None = None
    """Weight decay; not applied to biases, norms and parameters that the model exempts. By default 0.05, with
    --probe 0."""

    layer_decay: float | None = None
    """Layer-wise learning rate decay for fine-tuning: the factor from each layer to the one before it."""

    clip: float = 1.0
    """Maximum gradient norm; 0 disables clipping."""

    ema: float | None = None
    """Decay of an exponential moving average of the weights, such as 0.9999. The EMA weights are evaluated
    and saved."""

    workers: int = 0
    """Data loading processes per training process; 0 loads in the training process."""

    device: str = "auto"
    """Device: auto (an accelerator if there is one), cpu, cuda, cuda:1 or mps."""

    bf16: bool = False
    """Train in bfloat16 mixed precision."""

    channels_last: bool = False
    """Use channels-last memory format, which is often faster."""

    compile: bool = False
    """Compile the model with torch.compile; the first steps take minutes."""

    sync_bn: bool = False
    """Synchronize BatchNorm statistics over all processes; with several processes it needs GPUs."""

    save_every: int | None = None
    """Steps between snapshots to resume from; by default one per epoch."""

    keep: int = 2
    """Number of most recent snapshots to keep. If the newest one is damaged, the run resumes from the one
    before it."""

    max_bad_steps: int = 10
    """Consecutive steps that may be skipped because loss or gradient is not finite."""

    max_bad_images: float = 0.05
    """Share of unreadable images above which the run stops."""

    log: list[str] = field(default_factory=list)
    """Loggers besides log.jsonl and steps.jsonl: tensorboard, trackio, wandb."""

    log_every: int = 50
    """Steps between log records."""

    overwrite: bool = False
    """Replace the run in the output folder; files that no run wrote are kept."""

    resume: bool | Literal["auto"] = False
    """Resume the run in the output folder from its last snapshot; give the other options again. auto starts
    a new run if there is none."""

    def __post_init__(self) -> None:
        """Raise :class:`UserError` for the first option that cannot work, alone or with the others."""
        super().__post_init__()
        self._check_ranges()
        self._check_schedule()
        for name in self.log:
            if name not in LOGS:
                raise unknown("log", name, LOGS)
        if self.resume not in (True, False, "auto"):
            raise UserError(f"resume={self.resume!r} must be true, false or auto")
        if self.overwrite and self.resume:
            raise UserError("overwrite and resume exclude each other; give one of them")

    def _check_ranges(self) -> None:
        for name in ("epochs", "batch", "accumulate", "keep", "max_bad_steps", "log_every"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("save_every", self.save_every is None or self.save_every >= 1, "at least 1")
        for name in ("seed", "workers"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        self._require("lr", 0 < self.lr < math.inf, "more than 0")
        for name in ("weight_decay", "clip"):
            value = getattr(self, name)
            self._require(name, value is None or 0 <= value < math.inf, "at least 0")
        self._require("max_bad_images", 0 <= self.max_bad_images <= 1, "from 0 to 1")
        for name in ("ema", "layer_decay"):
            value = getattr(self, name)
            self._require(name, value is None or 0 < value < 1, "more than 0 and less than 1")
        if self.layer_decay is not None and self.frozen == "backbone":
            value = self.layer_decay
            raise UserError(f"layer_decay={value} has no effect on a frozen backbone; leave it out")

    def _check_schedule(self) -> None:
        if self.schedule not in SCHEDULES:
            raise unknown("schedule", self.schedule, SCHEDULES)
        self._require("warmup_epochs", 0 <= self.warmup <= self.epochs, f"from 0 to epochs={self.epochs}")
        for name in ("min_lr", "warmup_lr"):
            value = getattr(self, name)
            self._require(name, value is None or 0 <= value < math.inf, "at least 0")
            self._require(name, (value or 0) <= self.lr, f"at most the learning rate, lr={self.lr}")
        decay = self.decay_epochs
        if isinstance(decay, list):
            rising = sorted(set(decay)) == decay and all(0 < epoch < self.epochs for epoch in decay)
            self._require("decay_epochs", bool(decay) and rising, f"rising, from 0 to epochs={self.epochs}")
        else:
            self._require("decay_epochs", decay is None or 0 < decay < math.inf, "more than 0")
        rate = self.decay_rate
        self._require("decay_rate", rate is None or 0 < rate < math.inf, "more than 0")
        for name in ("decay_epochs", "decay_rate"):
            self._needs(name, "schedule", self.schedule == "step", "--schedule step")
        self._needs("min_lr", "schedule", self.schedule != "step", "--schedule cosine or poly")
        self._require("power", self.power is None or 0 < self.power < math.inf, "more than 0")
        self._needs("power", "schedule", self.schedule == "poly", "--schedule poly")
        self._needs("warmup_lr", "warmup_epochs", self.warmup > 0, "a warm-up")

    def filled(self) -> dict[str, Any]:
        """Return all options, with the default that depends on another one filled in."""
        return asdict(self) | {"weight_decay": self.decay}

    @property
    def decay(self) -> float:
        """Weight decay, with the default filled in."""
        if self.weight_decay is None:
            return 0.0 if self.probe else 0.05
        return self.weight_decay

    @property
    def warmup(self) -> float:
        """Epochs of warm-up, with the default filled in."""
        return min(5.0, self.epochs / 10) if self.warmup_epochs is None else self.warmup_epochs
