"""Choosing K by training, and training with it: stages two and three of Token Pooling (Appendix C).

1. A trained model: a checkpoint of a plain vision transformer, as ``vtok train`` leaves it.
2. :func:`search`: soft extraction gives every block's K; one λ gives one schedule.
3. :func:`finetune`: training goes on with hard pooling at those K, whatever the method.

Both run under the engine of ``visualtokens.train``: on one process or several, resumable after every epoch.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from visualtokens.errors import UserError, unknown
from visualtokens.reduce.reduction import reduce, restore
from visualtokens.reduce.trainable import (
    NAME,
    PACE,
    SOFT,
    extraction_cost,
    learned_keep,
    project,
    soft_extraction,
)
from visualtokens.reduce.trainable import pools as extraction_pools
from visualtokens.tasks.task import ExampleLoader, Loading, Loss, Task
from visualtokens.train import Checkpoint, TrainConfig, TrainResult, load_checkpoint, save_checkpoint, train
from visualtokens.train.distributed import is_first
from visualtokens.train.tasks import TASKS

logger = logging.getLogger(__name__)
EXTRACT = "extract"
# What the functions here decide; all other options of a training run are the caller's.
DECIDED = ("model", "model_args", "data", "out", "task", "init", "resume", "overwrite", "size")


class Extract(Task[Any, Any]):
    """Another task with soft extraction: its loss and the cost of the tokens that are left."""

    def __init__(self, inner: Task[Any, Any], *, base: str, price: float, pace: float) -> None:
        self.inner, self.model, self.classes = inner, inner.model, inner.classes
        self.name = inner.name  # what its checkpoints are good for
        self.images, self.score = inner.images, inner.score
        self.reduction = {"base": base, "method": SOFT, "price": price, "pace": pace}
        reduce(self.model, soft_extraction(price=price, pace=pace), keep=1.0, carry=False)

    def train_loader(self, loading: Loading) -> ExampleLoader[Any]:
        return self.inner.train_loader(loading)

    def val_loader(self, loading: Loading) -> ExampleLoader[Any]:
        return self.inner.val_loader(loading)

    def loss(self, model: nn.Module, batch: Any, *, rng: np.random.Generator) -> Loss:
        """The log shows ``tokens``, the mass that is left in all blocks together."""
        project(self.model)  # what the last step left outside of [0, 1]
        found = self.inner.loss(model, batch, rng=rng)
        mass = torch.stack([pool.r.detach().sum() for pool in extraction_pools(self.model)]).sum()
        return Loss(found.value + extraction_cost(self.model), {**found.sums, "tokens": mass * len(batch)})

    def evaluate(self, model: nn.Module, batches: Iterable[Any], *, progress: bool | None) -> Any:
        return self.inner.evaluate(model, batches, progress=progress)

    def describe(self) -> dict[str, Any]:
        plain = self.inner.describe()
        return plain | {"architecture": NAME, "model_args": plain["model_args"] | self.reduction}

    def to(self, device: torch.device) -> None:
        self.inner.to(device)


def open_extract(config: TrainConfig) -> Extract:
    """The task of a configuration whose ``model_args`` are those of a soft :func:`reduced_vit`."""
    args = dict(config.model_args)
    base, price, pace = args.pop("base"), args.pop("price"), args.pop("pace")
    inner = TASKS["classify"](dataclasses.replace(config, task="classify", model=base, model_args=args))
    return Extract(inner, base=base, price=price, pace=pace)


TASKS[EXTRACT] = open_extract


@dataclasses.dataclass(frozen=True)
class Found:
    """What :func:`search` learned."""

    keep: tuple[int, ...]  # K of every block
    mass: tuple[float, ...]  # Σ_j r_l[j]
    start: str  # checkpoint folder to fine-tune from: the plain model, as the search left its weights
    soft: TrainResult


class Interrupted(Exception):
    """A signal ended a stage early; the same call goes on from there."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"stopped by signal {signal}; the same command goes on from there")
        self.signal = signal


def search(
    start: str | Path,
    *,
    data: str,
    out: str | Path,
    price: float,
    pace: float = PACE,
    options: Mapping[str, Any] | None = None,
) -> Found:
    """Stage two: train with soft extraction from the checkpoint ``start`` on, and read K off.

    ``price`` is λ. ``options`` are those of :class:`~visualtokens.train.TrainConfig` (the paper: 30 epochs).
    Leaves the soft model in ``out/soft`` and the plain one in ``out/start``; goes on if interrupted.
    """
    source = _plain(start)
    args = source.config.get("model_args", {})
    base = source.config["architecture"]
    soft = {"base": base, "price": price, "pace": pace}
    config = _config(
        source,
        model=NAME,
        model_args=args | soft,
        data=data,
        out=Path(out) / "soft",
        task=EXTRACT,
        init=start,
        options=options,
    )
    _announce(f"soft extraction at lambda {price:g}, in {config.out}")
    result = _finished(train(config))
    learned = load_checkpoint(config.out)
    mass = tuple(pool.r.sum().item() for pool in extraction_pools(learned.model))
    keep = learned_keep(learned.model)
    plain = Path(out) / "start"
    restore(learned.model).pretrained_cfg = source.model.pretrained_cfg
    save_checkpoint(
        plain,
        learned.model,
        classes=source.classes,
        preprocess=source.preprocess,
        model_args=args,
        training={"keep": keep, "mass": mass, "price": price},
    )
    return Found(keep, mass, str(plain), result)


def finetune(
    start: str | Path,
    *,
    data: str,
    out: str | Path,
    method: str,
    keep: Sequence[int],
    options: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Stage three: train with hard pooling from the checkpoint ``start`` on.

    ``out`` becomes a checkpoint of a :func:`~visualtokens.reduce.reduction.reduced_vit`: loading it gives
    the reduced model. Goes on if interrupted.
    """
    source = _plain(start)
    pooled = {"base": source.config["architecture"], "method": method, "keep": list(keep), "carry": False}
    config = _config(
        source,
        model=NAME,
        model_args=source.config.get("model_args", {}) | pooled,
        data=data,
        out=out,
        task="classify",
        init=start,
        options=options,
    )
    _announce(f"fine-tuning with {method} at {list(keep)} tokens, in {config.out}")
    return _finished(train(config))


def _announce(stage: str) -> None:
    if is_first():
        logger.info(stage)


def _plain(start: str | Path) -> Checkpoint:
    source = load_checkpoint(start)
    if source.config["architecture"] == NAME:
        raise UserError(f"{str(start)!r} is reduced already; start from a checkpoint of the plain model")
    return source


def _config(
    source: Checkpoint,
    *,
    model: str,
    model_args: dict[str, Any],
    data: str,
    out: str | Path,
    task: str,
    init: str | Path,
    options: Mapping[str, Any] | None,
) -> TrainConfig:
    given = dict(options or {})
    for name in given:
        if name not in TrainConfig.names():
            raise unknown("option of training", name, TrainConfig.names())
        if name in DECIDED:
            raise UserError(f"{name}={given[name]!r} is not among the options of this training; leave it out")
    return TrainConfig(
        model=model,
        model_args=model_args,
        data=data,
        out=str(out),
        task=task,
        init=str(init),
        size=source.preprocess.size[0],
        resume="auto",
        **given,
    )


def _finished(result: TrainResult) -> TrainResult:
    if result.signal is not None:
        raise Interrupted(result.signal)
    return result
