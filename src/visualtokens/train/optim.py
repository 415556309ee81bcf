"""The optimizer and the learning rate of every step, from timm."""

from __future__ import annotations

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn

from visualtokens.train.config import TrainConfig


def create_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; no decay on biases, norms and what ``model.no_weight_decay()`` names."""
    return create_optimizer_v2(model, opt="adamw", lr=config.lr, weight_decay=config.weight_decay)


def create_schedule(optimizer: torch.optim.Optimizer, config: TrainConfig, *, steps: int) -> Scheduler:
    """A linear rise, then half a cosine, per step; ``steps`` are those of one epoch.

    The rate is a function of the step alone: ``schedule.step_update(step)`` sets it, in any order.
    """
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched="cosine",
        num_epochs=config.epochs,
        min_lr=config.min_lr,
        warmup_epochs=config.warmup,
        warmup_lr=config.min_lr,
        step_on_epochs=False,
        updates_per_epoch=steps,
    )
    return schedule
