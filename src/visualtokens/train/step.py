"""One training step: forward, loss, backward, clipping, update, EMA; the optimizer and its schedule."""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3, distribute_bn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from visualtokens.data import derive_seed, generator
from visualtokens.errors import UserError, unknown
from visualtokens.files import contiguous_weights, one_line
from visualtokens.tasks.freeze import eval_frozen, sync_trained_norms
from visualtokens.tasks.task import E, Loss, Training
from visualtokens.tasks.timm_models import require_layers
from visualtokens.train.config import TrainConfig
from visualtokens.train.distributed import Team
from visualtokens.train.snapshot import State

# Random streams; their keys are longer than those of the data, so that no stream is used twice.
DROPOUT, MIXING = (0, 0, 0, 1), (0, 0, 0, 2)


class Diverged(RuntimeError):
    """The loss, its gradient or the weights are not finite."""


@dataclass(frozen=True)
class StepResult:
    """Sums over the images of a step, over all processes, before its update."""

    images: int
    loss: float
    sums: dict[str, float]  # the other metrics of the task
    problem: str | None = None  # why the step was skipped


class Learner(Generic[E]):
    """A model with its optimizer, schedule, EMA and step count."""

    def __init__(
        self,
        training: Training[E],
        config: TrainConfig,
        *,
        device: torch.device,
        steps: int,
        team: Team | None = None,
    ) -> None:
        self.training, self.config, self.device, self.team = training, config, device, team or Team()
        self.memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        self.model = self._to_device(training.model)
        training.to(device)
        self.optimizer = create_optimizer(self.model, config)
        self.schedule = create_schedule(self.optimizer, config, steps=steps)
        self.ema = ModelEmaV3(self.model, decay=config.ema) if config.ema else None
        self.forward = self._parallel()
        self.step = 0
        self.skipped = 0  # steps with a loss or gradient that was not finite
        self.skipped_in_a_row = 0
        self._buffers = list(self.model.buffers())
        self._saved_buffers = [buffer.clone() for buffer in self._buffers]

    def _to_device(self, model: nn.Module) -> nn.Module:
        if self.config.sync_bn and self.team.size > 1:
            if self.device.type != "cuda":
                raise UserError(f"sync_bn needs a GPU for each process, not {self.device.type}; leave it out")
            model = sync_trained_norms(model)
        return model.to(self.device).to(memory_format=self.memory_format)

    def _parallel(self) -> nn.Module:
        model: Any = torch.compile(self.model) if self.config.compile else self.model
        if self.team.size == 1:
            return model
        ids = [self.device.index] if self.device.type == "cuda" else None
        # Harmless for 3×3 kernels with one input channel, whose strides are ambiguous.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)

    @property
    def eval_model(self) -> nn.Module:
        """The model to evaluate and save: the EMA model if there is one."""
        return self.model if self.ema is None else self.ema.module

    @property
    def lr(self) -> float:
        """The learning rate of the last step; the maximum over layers."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    def train_mode(self) -> None:
        """Put the model in training mode, except its frozen layers."""
        self.model.train()
        if self.config.frozen is not None or self.config.freeze_norms:
            eval_frozen(self.model)

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Return the mixed precision context of the configuration."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.bf16)

    def learn(self, batch: E, counts: Sequence[int] | None = None) -> StepResult:
        """Take one step; ``counts`` are the numbers of images of all processes, each at least 1.

        Loss and gradient are those of the mean over all images, however they are split. A step with a loss
        or gradient that is not finite only increments the step count; too many in a row raise
        :class:`Diverged`.
        """
        counts = counts or [len(batch)]
        self._prepare()
        pieces = batch.split(min(self.config.accumulate, *counts))
        losses = [
            self._backward(piece, images=sum(counts), last=number == len(pieces))
            for number, piece in enumerate(pieces, 1)
        ]
        norm = self._clip()
        result = self._aggregate(pieces, losses, norm, images=sum(counts))
        if result.problem is None:
            self._update()
        else:
            self._skip(result.problem)
        self.step += 1
        return result

    def leave_out(self) -> None:
        """Count a step without images, so that the schedule advances."""
        self.step += 1

    def _prepare(self) -> None:
        # Dropout depends on seed, step and process only, so that a resumed run repeats it.
        torch.manual_seed(derive_seed(self.config.seed, *DROPOUT, self.step, self.team.rank))
        self.schedule.step_update(self.step)
        self.optimizer.zero_grad()
        if self._buffers:
            torch._foreach_copy_(self._saved_buffers, self._buffers)

    def _backward(self, piece: E, *, images: int, last: bool) -> Loss:
        """Accumulate the gradient of one part; the last part synchronizes the processes."""
        sync: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if isinstance(self.forward, DistributedDataParallel) and not last:
            sync = self.forward.no_sync()
        rng = generator(self.config.seed, *MIXING, self.step)
        piece = piece.to(self.device, memory_format=self.memory_format)
        with sync:
            with self.autocast():
                loss = self.training.loss(self.forward, piece, rng=rng)
            # DDP averages the gradients of the processes, so each is weighted by its number of images.
            (loss.value * (len(piece) * self.team.size / images)).backward()
        return loss

    def _clip(self) -> float:
        if self.config.clip:
            return nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip).item()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return nn.utils.get_total_norm(gradients).item()

    def _aggregate(
        self, pieces: Sequence[E], losses: Sequence[Loss], norm: float, *, images: int
    ) -> StepResult:
        """Sum the losses and metrics of all parts and processes, and check that they are finite."""
        names = sorted(losses[0].sums)
        loss = sum(loss.value.item() * len(piece) for piece, loss in zip(pieces, losses, strict=True))
        sums = [float(sum(each.sums[name].item() for each in losses)) for name in names]
        total, *totals = self.team.exchange([loss, *sums]).sum(0).tolist()
        problem = None
        for what, value in (("loss", total / images), ("norm of the gradient", norm)):
            if problem is None and not math.isfinite(value):
                problem = f"the {what} is {value} at step {self.step + 1} (learning rate {self.lr:.2g})"
        return StepResult(images, total, dict(zip(names, totals, strict=True)), problem)

    def _update(self) -> None:
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.model)
        self.skipped_in_a_row = 0

    def _skip(self, problem: str) -> None:
        """Discard the gradient and restore the buffers, such as running statistics."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._saved_buffers)
        self.optimizer.zero_grad()
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.config.max_bad_steps:
            raise Diverged(
                f"{problem}, the last of {self.skipped_in_a_row} such steps in a row; none was saved; "
                "try a lower lr, a longer warm-up or a smaller clip"
            )

    def weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        """Return the weights to evaluate, and the trained ones if they differ."""
        trained = None if self.ema is None else contiguous_weights(self.model)
        return contiguous_weights(self.eval_model), trained

    def load(self, state: State, weights: dict[str, Tensor]) -> None:
        """Restore a snapshot."""
        self.step, self.skipped = state.step, state.skipped
        self.skipped_in_a_row = state.skipped_in_a_row
        try:
            self.eval_model.load_state_dict(weights)
            if state.trained is not None:
                self.model.load_state_dict(state.trained)
            self.optimizer.load_state_dict(state.optimizer)
        except (RuntimeError, ValueError) as error:  # other names, shapes or parameter groups
            raise UserError(
                f"the snapshot does not fit the model: {one_line(error)}; "
                "resume with the data and the version of the run, or start again with --overwrite"
            ) from error

    def require_finite_weights(self) -> None:
        """Raise :class:`Diverged` if a weight is not finite."""
        for name, weight in self.eval_model.state_dict().items():
            if weight.is_floating_point() and not torch.isfinite(weight).all():
                raise Diverged(
                    f"{name} is not finite after step {self.step} (learning rate {self.lr:.2g}), so it was "
                    "not saved; try a lower lr, a longer warm-up or a smaller clip"
                )

    def sync_statistics(self) -> None:
        """Copy the running statistics of the main process, which are saved, to all processes."""
        if self.team.size > 1:
            distribute_bn(self.model, self.team.size, reduce=False)
            if self.ema is not None:
                distribute_bn(self.ema.module, self.team.size, reduce=False)


LOWEST_LR = 1e-6


def create_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer, without weight decay on biases, norms and ``model.no_weight_decay()``.

    With ``layer_decay``, parameter groups are the layers of ``model.group_matcher()``, each with an
    ``lr_scale``. Frozen parameters are left out.
    """
    if config.layer_decay is not None:
        require_layers(model, f"layer_decay={config.layer_decay}: {type(model).__name__}")
    if config.optimizer not in list_optimizers():
        raise unknown("optimizer", config.optimizer, list_optimizers())
    has_kernel = "fused" in _check_args(config) and next(model.parameters()).device.type in ("cpu", "cuda")
    chosen = "fused" in config.optimizer_args or "foreach" in config.optimizer_args
    # On a CPU the fused kernel takes a quarter of the time of a loop over the weights.
    fused = {"fused": True} if has_kernel and not chosen else {}
    try:
        optimizer = create_optimizer_v2(
            model,
            opt=config.optimizer,
            lr=config.lr,
            weight_decay=config.decay,
            layer_decay=config.layer_decay,
            **fused,
            **config.optimizer_args,
        )
    except (TypeError, ValueError) as error:
        raise UserError(
            f"optimizer {config.optimizer!r} refuses optimizer_args={config.optimizer_args}: {error}"
        ) from error
    if config.layer_decay is not None and all(group["lr_scale"] == 1 for group in optimizer.param_groups):
        raise UserError(
            f"layer_decay={config.layer_decay} has no effect: all trained parameters of "
            f"{type(model).__name__} are in one layer; leave it out"
        )
    for name, value in config.optimizer_args.items():
        used = optimizer.defaults.get(name)
        if value != (list(used) if isinstance(used, tuple) else used):
            raise UserError(f"optimizer {config.optimizer!r} ignores {name}={value}; leave it out")
    return optimizer


def _check_args(config: TrainConfig) -> list[str]:
    """Return the arguments of the optimizer; all that are given must be among them."""
    kind = get_optimizer_class(config.optimizer, bind_defaults=False)
    known = [
        name for name in inspect.signature(kind).parameters if name not in ("params", "lr", "weight_decay")
    ]
    for name in config.optimizer_args:
        if name not in known:
            raise unknown(f"argument of {config.optimizer} in optimizer_args:", name, known)
    return known


def create_schedule(optimizer: torch.optim.Optimizer, config: TrainConfig, *, steps: int) -> Scheduler:
    """Return the schedule: linear warm-up, then the decay of the configuration; an epoch has ``steps`` steps.

    Cosine and polynomial span all epochs, and the warm-up replaces their start. Step decays are counted from
    the end of the warm-up unless their epochs are listed. The learning rate is a function of the step:
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
        # timm decays one step early; half a step avoids rounding errors.
        decay_milestones=[epoch + 0.5 / steps for epoch in listed],
        # timm calls the power of its polynomial a decay rate
        decay_rate=(config.power or 1.0) if config.schedule == "poly" else config.decay_rate or 0.1,
        warmup_epochs=config.warmup,
        warmup_lr=lowest if config.warmup_lr is None else config.warmup_lr,
        warmup_prefix=config.schedule == "step" and not listed,
        step_on_epochs=False,
        updates_per_epoch=steps,
    )
    return schedule
