"""What an option must be, told by its name and value before anything else happens."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from visualtokens.errors import UserError, unknown

if TYPE_CHECKING:
    from visualtokens.train.config import TrainConfig

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
