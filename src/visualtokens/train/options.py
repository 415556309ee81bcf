"""What several tasks make of the options of a run."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from visualtokens.errors import UserError
from visualtokens.train.config import TrainConfig

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
