"""The optimizer and the learning rate of every step, from timm."""

from __future__ import annotations

import inspect

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn

from visualtokens.errors import UserError, unknown
from visualtokens.train.config import TrainConfig

LOWEST_LR = 1e-6


def create_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer; no decay on biases, norms and what ``model.no_weight_decay()`` names.

    With ``layer_decay``, the groups are the layers by ``model.group_matcher()``, each with its ``lr_scale``.
    """
    if config.optimizer not in list_optimizers():
        raise unknown("optimizer", config.optimizer, list_optimizers())
    has_kernel = "fused" in _check_args(config) and next(model.parameters()).device.type in ("cpu", "cuda")
    chosen = "fused" in config.optimizer_args or "foreach" in config.optimizer_args
    # All weights in one kernel: on a CPU, a quarter of the time that one after the other takes.
    one_kernel = {"fused": True} if has_kernel and not chosen else {}
    try:
        optimizer = create_optimizer_v2(
            model,
            opt=config.optimizer,
            lr=config.lr,
            weight_decay=config.weight_decay,
            layer_decay=config.layer_decay,
            **one_kernel,
            **config.optimizer_args,
        )
    except (TypeError, ValueError) as error:
        raise UserError(
            f"optimizer {config.optimizer!r} refuses optimizer_args={config.optimizer_args}: {error}"
        ) from error
    for name, value in config.optimizer_args.items():
        used = optimizer.defaults.get(name)
        if value != (list(used) if isinstance(used, tuple) else used):
            raise UserError(f"optimizer {config.optimizer!r} makes no use of {name}={value}; leave it out")
    return optimizer


def _check_args(config: TrainConfig) -> list[str]:
    """The arguments that the optimizer knows, if all that are given are among them."""
    kind = get_optimizer_class(config.optimizer, bind_defaults=False)
    known = [
        name for name in inspect.signature(kind).parameters if name not in ("params", "lr", "weight_decay")
    ]
    for name in config.optimizer_args:
        if name not in known:
            raise unknown(f"argument of {config.optimizer} in optimizer_args:", name, known)
    return known


def create_schedule(optimizer: torch.optim.Optimizer, config: TrainConfig, *, steps: int) -> Scheduler:
    """The learning rate per step, of which an epoch has ``steps``: a linear rise, then a fall.

    Half a cosine over all epochs, whose start the warm-up takes the place of; or steps, counted from the
    end of the warm-up unless their epochs are listed. The rate is a function of the step alone:
    ``schedule.step_update(step)`` sets it, in any order.
    """
    lowest = min(LOWEST_LR, config.lr / 10)
    every = config.decay_epochs or 30.0
    listed = every if isinstance(every, list) else []
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched="multistep" if listed else config.schedule,
        num_epochs=config.epochs,
        min_lr=lowest if config.min_lr is None else config.min_lr,
        decay_epochs=every,
        # timm lets them fall one step early; half a step stands above rounding.
        decay_milestones=[epoch + 0.5 / steps for epoch in listed],
        decay_rate=config.decay_rate or 0.1,
        warmup_epochs=config.warmup,
        warmup_lr=lowest if config.warmup_lr is None else config.warmup_lr,
        warmup_prefix=config.schedule == "step" and not listed,
        step_on_epochs=False,
        updates_per_epoch=steps,
    )
    return schedule
