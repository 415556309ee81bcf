"""Everything a training run depends on, as one dataclass: the options of ``vtok train``."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from visualtokens.errors import UserError, unknown


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a model and save it as a folder that timm, ``vtok eval`` and others can load."""

    model: str
    """Name of the model: one of `vtok models`, or any other model of timm. To segment: fpn, vt_fpn, upernet;
    to detect: mask_rcnn, cascade_mask_rcnn, retinanet; both with such a model as --model_args.backbone."""

    data: str
    """Images to learn from: digits, digit_scenes, folder:PATH, npz:FILE, wds:PATH or hfds:NAME. To segment:
    digit_scenes, masks:, pets:, ade20k:, cocostuff: or lip:PATH; to detect: digit_scenes or coco:PATH."""

    out: str
    """Folder for the result: the model, its settings, the log, and what is needed to resume."""

    task: str = "classify"
    """What to learn: classify (a label per image), segment (a class per pixel), detect (boxes, masks)."""

    init: str | None = None
    """Checkpoint folder whose weights to start from; a head for other classes starts anew."""

    epochs: int = 10
    """How many times to go through the training images."""

    seed: int = 0
    """Start of every random choice; the same seed gives the same model on the same machine."""

    batch: int = 64
    """Images per step, of all processes together."""

    accumulate: int = 1
    """Pieces in which each process works through its images of a step; more need less memory."""

    size: int | None = None
    """Side of the square images the model sees, in pixels; by default the model's own input size.
    To detect, the short side of images in their own shape; by default 800."""

    augment: str | None = None
    """How training images are varied: none, digits, photo, imagenet or cifar.
    By default digits for digits, else photo. To segment: none, digits, photo, coco, ade20k; to detect:
    none, photo, multiscale."""

    auto_augment: str | None = None
    """Policy of timm on top of that, such as rand-m9-mstd0.5-inc1, original or augmix-m3."""

    random_erasing: float = 0.0
    """Share of the training images of which a rectangle becomes noise."""

    mixup: float = 0.0
    """Blend pairs of images by Mixup with this parameter; 0 does not."""

    cutmix: float = 0.0
    """Paste a part of one image into another by CutMix with this parameter; 0 does not."""

    label_smoothing: float = 0.1
    """How much of each label is spread over the other classes."""

    loss_args: dict[str, Any] = field(default_factory=dict)
    """To segment: auxiliary, the weight of the auxiliary head (0.4), and class_weights, such as
    --loss_args.class_weights.border 2."""

    teacher: str | None = None
    """Model to learn from besides the labels: a checkpoint folder, or a model of timm with its weights."""

    distill: float | None = None
    """Weight of the teacher's answers in the loss; the labels have the rest. By default 0.5."""

    distill_temperature: float | None = None
    """How much to soften both answers before they are compared; by default 1, which does not."""

    optimizer: str = "adamw"
    """Optimizer, by its name in timm: adamw, nesterov (SGD), rmsproptf, lamb and others."""

    optimizer_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer, such as --optimizer_args.momentum 0.9."""

    lr: float = 1e-3
    """Highest learning rate."""

    schedule: Literal["cosine", "step"] = "cosine"
    """How the learning rate falls after the warm-up: along half a cosine, or in steps."""

    min_lr: float | None = None
    """Learning rate at the very end of the cosine; by default 1e-6, or a tenth of lr if that is less."""

    decay_epochs: float | list[float] | None = None
    """Epochs between two steps of the learning rate, for --schedule step; by default 30.
    A list tells after which epochs they come, such as [8, 11]."""

    decay_rate: float | None = None
    """Factor of each such step; by default 0.1."""

    warmup_epochs: float | None = None
    """Epochs in which the learning rate rises; by default a tenth of all, at most 5."""

    warmup_lr: float | None = None
    """Learning rate at the start of the warm-up; by default 1e-6, or a tenth of lr if that is less."""

    weight_decay: float = 0.05
    """Decay of the weights; biases, norms and what the model exempts are left alone."""

    layer_decay: float | None = None
    """Factor of the learning rate from each layer to the one before it, to fine-tune."""

    clip: float = 1.0
    """Largest norm of the gradient, larger ones are scaled down; 0 clips nothing."""

    ema: float | None = None
    """Decay of a running average of the weights, such as 0.9999; it is what is judged and saved."""

    drop_path: float | dict[str, float] | None = None
    """Stochastic depth: a rate, or rates by patterns of model names, of which the first that fits counts."""

    model_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model, such as --model_args.drop_rate 0.2."""

    workers: int = 0
    """Processes that prepare images, for each process that trains; 0 prepares them there."""

    device: str = "auto"
    """Where to compute: auto (a GPU if there is one), cpu, cuda, cuda:1, mps."""

    bf16: bool = False
    """Compute in bfloat16 where it is safe (automatic mixed precision)."""

    channels_last: bool = False
    """Keep images and convolutions in channels-last memory order, which is often faster."""

    compile: bool = False
    """Compile the model with torch.compile; the first steps then take minutes."""

    sync_bn: bool = False
    """Let BatchNorm see the images of all processes; needs GPUs if there are several."""

    save_every: int | None = None
    """Steps between two snapshots to resume from; by default one after every epoch."""

    keep: int = 1
    """How many snapshots to keep, the newest ones."""

    max_bad_steps: int = 10
    """How many steps in a row may be skipped because loss or gradient is not finite."""

    max_bad_images: float = 0.05
    """Share of the images that may turn out unreadable before the run stops."""

    log: list[str] = field(default_factory=list)
    """Where to log besides log.jsonl and steps.jsonl: tensorboard, trackio, wandb."""

    log_every: int = 50
    """Steps between two records in steps.jsonl and in those."""

    overwrite: bool = False
    """Replace a run that the folder already holds."""

    resume: bool | Literal["auto"] = False
    """Go on with the run in the folder, from its last snapshot; give the other options again.
    With auto, start if there is none yet."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def warmup(self) -> float:
        """Epochs of warm-up, with the default filled in."""
        return min(5.0, self.epochs / 10) if self.warmup_epochs is None else self.warmup_epochs

    def given(self, name: str) -> bool:
        """Whether the option differs from its default."""
        return bool(getattr(self, name) != default_of(self, name))

    @classmethod
    def names(cls) -> list[str]:
        """Of all options."""
        return [each.name for each in fields(cls)]


# What an option must be, told by its name and value before anything else happens.

SCHEDULES = ("cosine", "step")
LOGS = ("tensorboard", "trackio", "wandb")


def check(config: TrainConfig) -> None:
    """:class:`UserError` for the first option that cannot work, alone or with the others."""
    _check_ranges(config)
    _check_schedule(config)
    _check_partners(config)
    for name in config.log:
        if name not in LOGS:
            raise unknown("log", name, LOGS)
    if config.resume not in (True, False, "auto"):
        raise UserError(f"resume={config.resume!r} must be true, false or auto")
    if config.overwrite and config.resume:
        raise UserError("overwrite and resume exclude each other; give one of them")


def _check_ranges(config: TrainConfig) -> None:
    for name in ("epochs", "batch", "accumulate", "keep", "max_bad_steps", "log_every"):
        _require(config, name, getattr(config, name) >= 1, "at least 1")
    for name in ("size", "save_every"):
        value = getattr(config, name)
        _require(config, name, value is None or value >= 1, "at least 1")
    for name in ("seed", "workers"):
        _require(config, name, getattr(config, name) >= 0, "at least 0")
    _require(config, "lr", 0 < config.lr < math.inf, "more than 0")
    for name in ("weight_decay", "clip", "mixup", "cutmix"):
        _require(config, name, 0 <= getattr(config, name) < math.inf, "at least 0")
    for name in ("random_erasing", "max_bad_images"):
        _require(config, name, 0 <= getattr(config, name) <= 1, "from 0 to 1")
    _require(config, "label_smoothing", 0 <= config.label_smoothing < 1, "at least 0 and less than 1")
    for name in ("ema", "layer_decay"):
        value = getattr(config, name)
        _require(config, name, value is None or 0 < value < 1, "more than 0 and less than 1")
    rates = config.drop_path.values() if isinstance(config.drop_path, dict) else [config.drop_path or 0.0]
    _require(config, "drop_path", all(0 <= rate < 1 for rate in rates), "at least 0 and less than 1")


def _check_schedule(config: TrainConfig) -> None:
    if config.schedule not in SCHEDULES:
        raise unknown("schedule", config.schedule, SCHEDULES)
    _require(
        config, "warmup_epochs", 0 <= config.warmup <= config.epochs, f"from 0 to epochs={config.epochs}"
    )
    for name in ("min_lr", "warmup_lr"):
        value = getattr(config, name)
        _require(config, name, value is None or 0 <= value < math.inf, "at least 0")
        _require(config, name, (value or 0) <= config.lr, f"at most the learning rate, lr={config.lr}")
    decay = config.decay_epochs
    if isinstance(decay, list):
        rising = sorted(set(decay)) == decay and all(0 < epoch < config.epochs for epoch in decay)
        _require(config, "decay_epochs", bool(decay) and rising, f"rising, from 0 to epochs={config.epochs}")
    else:
        _require(config, "decay_epochs", decay is None or 0 < decay < math.inf, "more than 0")
    rate = config.decay_rate
    _require(config, "decay_rate", rate is None or 0 < rate < math.inf, "more than 0")
    for name in ("decay_epochs", "decay_rate"):
        _needs(config, name, "schedule", config.schedule == "step", "--schedule step")
    _needs(config, "min_lr", "schedule", config.schedule == "cosine", "--schedule cosine")
    _needs(config, "warmup_lr", "warmup_epochs", config.warmup > 0, "a warm-up")


def _check_partners(config: TrainConfig) -> None:
    for name in ("distill", "distill_temperature"):
        _needs(config, name, "teacher", config.teacher is not None, "a --teacher")
    if config.distill is not None:
        _require(config, "distill", 0 < config.distill <= 1, "more than 0 and at most 1")
    if config.distill_temperature is not None:
        _require(config, "distill_temperature", 0 < config.distill_temperature < math.inf, "more than 0")
    if config.drop_path is not None and "drop_path_rate" in config.model_args:
        raise UserError("drop_path and model_args.drop_path_rate are the same; give one of them")


def _require(config: TrainConfig, name: str, holds: bool, bounds: str) -> None:
    if not holds:
        raise UserError(f"{name}={getattr(config, name)} must be {bounds}")


def _needs(config: TrainConfig, name: str, other: str, holds: bool, wanted: str) -> None:
    """Refuse an option that would have no effect."""
    if getattr(config, name) is not None and not holds:
        raise UserError(
            f"{name}={getattr(config, name)} has no effect with {other}={getattr(config, other)}; "
            f"leave it out or give {wanted}"
        )


def default_of(config: TrainConfig, name: str) -> Any:
    """The default of an option; None for one that must be given."""
    field = next(each for each in dataclasses.fields(config) if each.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


# What several tasks make of the options of a run.

# Options that only classifiers make use of.
CLASSIFY_ONLY = (
    *("auto_augment", "random_erasing", "mixup", "cutmix", "teacher", "distill", "distill_temperature"),
)


def refuse(config: TrainConfig, names: Sequence[str]) -> None:
    """:class:`UserError` for the first of these options that is given: the task makes no use of them."""
    for name in names:
        if config.given(name):
            raise UserError(
                f"{name}={getattr(config, name)} has no effect with task={config.task}; leave it out"
            )


def drop_path_rate(rates: float | Mapping[str, float], model: str) -> float:
    """The rate of stochastic depth for a model, of a table of patterns that of the first one that fits."""
    if not isinstance(rates, Mapping):
        return rates
    for pattern, rate in rates.items():
        if fnmatch.fnmatch(model, pattern):
            return rate
    raise UserError(f"drop_path has no rate for {model!r}, only for {', '.join(rates)}; add one, or '*'")


def backbone_args(config: TrainConfig) -> dict[str, Any]:
    """The arguments of a model with a backbone, with the stochastic depth that another option decides."""
    model_args = dict(config.model_args)
    if config.drop_path is None:
        return model_args
    body = dict(model_args.get("backbone_args") or {})
    if "drop_path_rate" in body:
        raise UserError(
            "drop_path and model_args.backbone_args.drop_path_rate are the same; give one of them"
        )
    rate = drop_path_rate(config.drop_path, model_args.get("backbone", ""))
    return model_args | {"backbone_args": body | {"drop_path_rate": rate}}


def shows_digits(data: str) -> bool:
    """Whether images must not be mirrored; data that are not known are taken for photographs."""
    return data.partition(":")[0] in ("digits", "digit_scenes")
