"""One step of training: forward, loss, backward, clip, update."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor, nn

from visualtokens.tasks.classify import loss_of
from visualtokens.train.config import TrainConfig
from visualtokens.train.optim import create_optimizer, create_schedule


class Diverged(RuntimeError):
    """The loss or its gradient is no longer a finite number."""


class Learner:
    """A model together with what changes it: optimizer, schedule, and the count of steps."""

    def __init__(self, model: nn.Module, config: TrainConfig, *, device: torch.device, steps: int) -> None:
        self.config = config
        self.device = device
        self.memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        self.model = model.to(device).to(memory_format=self.memory_format)
        self.optimizer = create_optimizer(self.model, config)
        self.schedule = create_schedule(self.optimizer, config, steps=steps)
        self.step = 0

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return self.optimizer.param_groups[0]["lr"]

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """bfloat16 where the configuration asks for it."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.bf16)

    def learn(self, images: Tensor, labels: Tensor) -> tuple[float, int]:
        """Take one step. Gives the loss before it and how many images were labelled right."""
        images = images.to(self.device, memory_format=self.memory_format, non_blocking=True)
        labels = labels.to(self.device, non_blocking=True)
        self.schedule.step_update(self.step)
        with self.autocast():
            logits = self.model(images)  # (B, classes)
            loss = loss_of(logits, labels, smoothing=self.config.label_smoothing)
        value = loss.item()
        self.require_finite("loss", value, step=self.step + 1)
        self.optimizer.zero_grad()
        loss.backward()
        # An infinite bound clips nothing but still tells the norm.
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or torch.inf)
        self.require_finite("norm of the gradient", norm.item(), step=self.step + 1)
        self.optimizer.step()
        self.step += 1
        return value, int((logits.argmax(1) == labels).sum())

    def skip(self) -> None:
        """Count a step whose images could all not be read, so that the schedule keeps its pace."""
        self.step += 1

    def require_finite(self, what: str, value: float, *, step: int) -> None:
        """:class:`Diverged` unless the value is a number."""
        if not math.isfinite(value):
            raise Diverged(
                f"the {what} is {value} at step {step} (learning rate {self.lr:.2g}); nothing of this epoch "
                "was saved; try a lower lr, a longer warm-up or a smaller clip"
            )
