"""Learn a schedule by training, and fine-tune with it: stages two and three of Token Pooling (Appendix C).

1. Train a plain vision transformer (``vtok train``).
2. :func:`search`: soft extraction learns K of every block; each λ gives one schedule.
3. :func:`finetune`: continue training with hard pooling to those K, with any method.

Both functions run ``visualtokens.train``: on one or several processes, resumable after every epoch.
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

from visualtokens.checkpoint import load_checkpoint, save_checkpoint
from visualtokens.errors import UserError, unknown
from visualtokens.processes import is_main_process
from visualtokens.reduce.reduction import reduce, restore
from visualtokens.reduce.trainable import (
    NAME,
    PACE,
    SOFT,
    extraction_cost,
    extraction_pools,
    learned_keep,
    project,
    soft_extraction,
)
from visualtokens.tasks.classify import Classify
from visualtokens.tasks.options import TaskOptions
from visualtokens.tasks.task import (
    Checkpoint,
    ExampleLoader,
    Loading,
    Loss,
    Training,
    get_task,
    register_task,
)
from visualtokens.train import TrainConfig, TrainResult, train

logger = logging.getLogger(__name__)
EXTRACT = "extract"
# Training options that search() and finetune() set themselves; the caller may give the others.
FIXED = ("model", "model_args", "data", "out", "task", "init", "resume", "overwrite", "size")


class ExtractTraining(Training[Any]):
    """Training with soft extraction: the loss of the inner training plus the extraction cost."""

    def __init__(self, inner: Training[Any], *, base: str, price: float, pace: float) -> None:
        super().__init__(
            inner.task,  # its checkpoints are those of the inner task
            inner.model,
            train_set=inner.train_set,
            val_set=inner.val_set,
            preprocess=inner.preprocess,
        )
        self.inner, self.notes = inner, inner.notes
        self.reduction = {"base": base, "method": SOFT, "price": price, "pace": pace}
        reduce(self.model, soft_extraction(price=price, pace=pace), keep=1.0, carry=False)

    def train_loader(self, loading: Loading) -> ExampleLoader[Any]:
        return self.inner.train_loader(loading)

    def loss(self, model: nn.Module, batch: Any, *, rng: np.random.Generator) -> Loss:
        """The loss; the log shows ``tokens``, the sum of r over all blocks."""
        project(self.model)  # the last optimizer step may have left [0, 1]
        found = self.inner.loss(model, batch, rng=rng)
        mass = torch.stack([pool.r.detach().sum() for pool in extraction_pools(self.model)]).sum()
        return Loss(found.value + extraction_cost(self.model), {**found.sums, "tokens": mass * len(batch)})

    def evaluate(self, model: nn.Module, batches: Iterable[Any], *, progress: bool | None) -> Any:
        return self.inner.evaluate(model, batches, progress=progress)

    def describe(self) -> dict[str, Any]:
        plain = self.inner.describe()
        return plain | {"architecture": NAME, "model_args": plain["model_args"] | self.reduction}

    def heads(self) -> set[str]:
        return self.inner.heads()

    def to(self, device: torch.device) -> None:
        self.inner.to(device)


class Extract(Classify):
    """Classification with the ``model_args`` of a soft ``reduced_vit``."""

    name = EXTRACT

    def open(self, options: TaskOptions) -> ExtractTraining:  # type: ignore[override]
        args = dict(options.model_args)
        base, price, pace = args.pop("base"), args.pop("price"), args.pop("pace")
        plain = dataclasses.replace(options, task="classify", model=base, model_args=args)
        return ExtractTraining(get_task("classify").open(plain), base=base, price=price, pace=pace)


register_task(Extract())


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The schedule that :func:`search` learned, and its checkpoints."""

    keep: tuple[int, ...]  # K of every block
    mass: tuple[float, ...]  # Σ_j r_l[j]
    start: str  # checkpoint folder to fine-tune from: the plain model with the weights of the search
    soft: TrainResult  # of the training with soft extraction


class Interrupted(Exception):
    """A signal stopped the training; the same call resumes it."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"stopped by signal {signal}; run the same command again to resume")
        self.signal = signal


def search(
    start: str | Path,
    *,
    data: str,
    out: str | Path,
    price: float,
    pace: float = PACE,
    options: Mapping[str, Any] | None = None,
) -> SearchResult:
    """Stage two: train the checkpoint ``start`` with soft extraction, and return the learned schedule.

    ``price`` is λ. ``options`` are those of :class:`~visualtokens.train.TrainConfig` (the paper: 30 epochs).
    Saves the soft model in ``out/soft`` and the plain one in ``out/start``; resumes if interrupted.
    """
    source = _load_plain(start)
    args = source.config.get("model_args", {})
    soft = Path(out) / "soft"
    result = _train(
        source,
        f"soft extraction at lambda {price:g}, in {soft}",
        task=EXTRACT,
        model_args=args | {"base": source.config["architecture"], "price": price, "pace": pace},
        data=data,
        out=soft,
        init=start,
        options=options,
    )
    learned = load_checkpoint(soft)
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
    return SearchResult(keep, mass, str(plain), result)


def finetune(
    start: str | Path,
    *,
    data: str,
    out: str | Path,
    method: str,
    keep: Sequence[int],
    reduction: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Stage three: train the checkpoint ``start`` with hard pooling.

    ``reduction`` are further arguments of ``reduce``: ``init``, ``iterations``, ``carry`` (False by default),
    ``normalize_qk`` and ``alpha``. ``options`` are those of :class:`~visualtokens.train.TrainConfig`.
    ``out`` becomes a checkpoint of a :func:`~visualtokens.reduce.trainable.reduced_vit`: loading it returns
    the reduced model. Resumes if interrupted.
    """
    source = _load_plain(start)
    chosen = {"method": method, "keep": list(keep), "carry": False} | dict(reduction or {})
    return _train(
        source,
        f"fine-tuning with {method} at {list(keep)} tokens, in {out}",
        task="classify",
        model_args=source.config.get("model_args", {}) | {"base": source.config["architecture"]} | chosen,
        data=data,
        out=out,
        init=start,
        options=options,
    )


def _load_plain(start: str | Path) -> Checkpoint:
    source = load_checkpoint(start)
    if source.config["architecture"] == NAME:
        raise UserError(f"{str(start)!r} is already reduced; start from a checkpoint of the plain model")
    return source


def _train(
    source: Checkpoint,
    stage: str,
    *,
    task: str,
    model_args: dict[str, Any],
    data: str,
    out: str | Path,
    init: str | Path,
    options: Mapping[str, Any] | None,
) -> TrainResult:
    """Train a ``reduced_vit`` to the end, or raise :class:`Interrupted`."""
    given = dict(options or {})
    for name in given:
        if name not in TrainConfig.names():
            raise unknown("training option", name, TrainConfig.names())
        if name in FIXED:
            raise UserError(f"{name}={given[name]!r} cannot be chosen here; leave it out")
    config = TrainConfig(
        model=NAME,
        model_args=model_args,
        data=data,
        out=str(out),
        task=task,
        init=str(init),
        size=source.preprocess.size[0],
        resume="auto",
        **given,
    )
    if is_main_process():
        logger.info(stage)
    result = train(config)
    if result.signal is not None:
        raise Interrupted(result.signal)
    return result
