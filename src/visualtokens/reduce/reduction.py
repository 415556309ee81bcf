"""Add token reduction to a vision transformer, and remove it again."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from visualtokens.errors import UserError, unknown
from visualtokens.reduce.attention import parts_of
from visualtokens.reduce.blocks import BlockReduction, attentions
from visualtokens.reduce.encoder import Encoder
from visualtokens.reduce.families import encoder_of
from visualtokens.reduce.methods import DEFAULT_METHOD, LEAST_SHARE, Factory, Init, Place, Pool, find_method
from visualtokens.reduce.schedule import Keep, Schedule

# The clustering of Token Pooling: it starts from the most significant tokens (Appendix B) and has the three
# updates that the published costs of k-means contain; the paper states no number for k-medoids.
AS_PUBLISHED: Mapping[str, Any] = {"init": "significance", "iterations": 3}


@dataclass(frozen=True)
class Reduction:
    """How a model is reduced; a reduced model has it as ``model.reduction``."""

    method: str
    schedule: Schedule
    carry: bool
    init: Init
    iterations: int | None
    normalize_qk: bool
    alpha: float | Literal["learned"]
    registered: bool  # whether `method` is a name that `reduce` accepts
    threshold: tuple[float, ...] | None = None  # of each block; the schedule then holds the least numbers

    def model_args(self) -> dict[str, Any]:
        """The arguments of ``reduced_vit`` that repeat this reduction, as JSON values."""
        if not self.registered:
            raise UserError(
                f"the method {self.method!r} has no registered name, so the model cannot be loaded again; "
                "give it one with visualtokens.reduce.register_method, and reduce by that name"
            )
        chosen: dict[str, Any] = {"method": self.method, "carry": self.carry}
        if self.threshold is None:
            chosen["keep"] = list(self.schedule.entries)
        else:
            chosen["threshold"] = list(self.threshold)
        defaults = {"init": "distinct", "iterations": None, "normalize_qk": False, "alpha": 1.0}
        own = {name: getattr(self, name) for name in defaults}
        return chosen | {name: value for name, value in own.items() if value != defaults[name]}


def reduce(
    model: nn.Module,
    method: str | Factory = DEFAULT_METHOD,
    *,
    keep: Keep | None = None,
    macs: float | None = None,
    speedup: float | None = None,
    latency_ms: float | None = None,
    images: Tensor | None = None,
    threshold: float | Sequence[float] | None = None,
    carry: bool = True,
    init: Init = "distinct",
    iterations: int | None = None,
    normalize_qk: bool = False,
    alpha: float | Literal["learned"] = 1.0,
) -> nn.Module:
    """Reduce the tokens of a vision transformer; changes ``model`` in place and returns it.

    ``model`` is one of timm, transformers, open_clip or torchvision, or contains one; docs/reduce_support.md
    lists the supported kinds.

    Between the attention and the MLP of every block, the block's n tokens are reduced to at most K. Prefix
    tokens (class, distillation, registers) are always kept and not counted. The weights do not change;
    :func:`restore` removes the reduction.

    | method | new tokens |
    |---|---|
    | ``kmeans``, ``weighted_kmeans`` | cluster means (Eq. 13–15), plain or weighted by significance |
    | ``kmedoids``, ``weighted_kmedoids`` | cluster medoids (Eq. 16–18), plain or weighted by significance |
    | ``power_bert`` | the most significant tokens; the others are dropped |
    | ``importance`` | tokens sampled by significance, without replacement |
    | ``random`` | tokens sampled uniformly, without replacement |
    | ``weighted_merge`` (default) | tokens that are similar to others and little significant join those |
    | ``merge`` | the most similar pairs are averaged (bipartite soft matching) |
    | ``conv`` | a 2×2 convolution with stride 2; halves the grid as soon as K tokens fit |

    The significance of a token is the attention that it receives, summed over all heads and queries.
    ``method`` may also be a name given to :func:`~visualtokens.reduce.register_method`, or a function that
    returns the :class:`~visualtokens.reduce.Pool` for a :class:`~visualtokens.reduce.Place`.

    ``keep`` is the number of tokens to keep: a list with one number per block, the share of the patches left
    after the last block (``0.5``), a negative number of tokens to remove in every block (``-13``), a
    published schedule (``"deit_small/3"``) or a saved plan (``"plan.json"``); see
    :meth:`Schedule.of <visualtokens.reduce.Schedule.of>`. Instead of ``keep``, give a budget: ``macs``,
    ``speedup`` or ``latency_ms``, and unlabelled ``images`` to choose the schedule by; see
    :func:`visualtokens.plan`. For images one by one, ``threshold`` keeps as many tokens as each image needs
    (``weighted_merge`` only): those that cost more to lose than this share of the cost of a unique token of
    average significance, one share or one per block.
    :func:`~visualtokens.tune.calibration.find_thresholds` finds them for a budget.

    ``carry``: in later attentions, a token that stands for s patches counts s times (Appendix E). Recommended
    for models trained without pooling; not needed for those trained with it.

    ``init``: the initial cluster centres: ``"distinct"`` tokens, which have no near-duplicate among the
    others (default), those of highest ``"significance"``, or ``"random"`` ones. ``iterations``: the number of
    cluster updates; by default 3 for k-means and 1 for k-medoids. ``**AS_PUBLISHED`` gives both as in the
    paper.

    ``normalize_qk``: queries and keys of unit length, with logits scaled by ``alpha`` (Appendix F). With
    ``alpha="learned"`` each block learns its own, initialised to √D. Only for models trained this way.

    New parameters: ``blocks.*.reduction.alpha`` if α is learned, and ``blocks.*.reduction.pool.weight`` for
    ``conv``. New taps: ``blocks.*.reduction.tap``. Reducing a reduced model replaces its reduction.
    """
    encoder = encoder_of(model)
    thresholds = None
    if threshold is not None:
        given = [value for value in (keep, macs, speedup, latency_ms, images) if value is not None]
        thresholds = _thresholds(threshold, len(encoder.blocks), given)
        keep = [LEAST_SHARE] * (len(encoder.blocks) - 1) + [0.0 if encoder.reads_prefix_only else LEAST_SHARE]
    elif keep is None:
        budget = {"macs": macs, "speedup": speedup, "latency_ms": latency_ms}
        options = {"init": init, "iterations": iterations}
        keep = _planned(model, method, **budget, images=images, options=options)
    elif any(budget is not None for budget in (macs, speedup, latency_ms, images)):
        raise UserError("keep is the schedule itself; leave macs, speedup, latency_ms and images out")
    _check_options(init, iterations, alpha, normalize_qk=normalize_qk)
    schedule = Schedule.of(keep, len(encoder.blocks))
    name = method if isinstance(method, str) else getattr(method, "__name__", type(method).__name__)
    factory, fit = find_method(method) if isinstance(method, str) else (method, None)
    patches = encoder.patches
    if fit is not None:
        schedule = Schedule(fit(schedule.tokens(patches), encoder.grid(encoder.image_size)))
    after = schedule.tokens(patches)
    before = (patches, *after[:-1])
    pools = []
    for i, block in enumerate(encoder.blocks):
        limit = None if thresholds is None else thresholds[i]
        place = Place(i, encoder.dim, patches, before[i], after[i], init, iterations, limit)
        pools.append(factory(place).to(next(block.parameters())))
    _check_pools(encoder, name, schedule, pools, iterations)
    if threshold is not None and not all(hasattr(pool, "threshold") for pool in pools):
        raise UserError(f"{name} has no threshold; use weighted_merge, or give keep or a budget")
    if encoder.reduced:
        restore(model)
    for block, pool in zip(encoder.blocks, pools, strict=True):
        own: Any = block
        scale = _scale(block, alpha) if normalize_qk else None
        own.reduction = BlockReduction(pool, prefix=encoder.prefix, carry=carry, alpha=scale)
        own.reduction.train(block.training)
    encoder.module.reduction = Reduction(
        method=name,
        schedule=schedule,
        carry=carry,
        init=init,
        iterations=iterations,
        normalize_qk=normalize_qk,
        alpha=alpha,
        registered=isinstance(method, str),
        threshold=thresholds,
    )
    encoder.install(joins=all(pool.joins for pool in pools))
    return model


def _thresholds(
    threshold: float | Sequence[float], blocks: int, given: Sequence[object]
) -> tuple[float, ...]:
    """One threshold per block; ``given`` are other arguments that would decide the number of tokens."""
    values = tuple(threshold) if isinstance(threshold, Sequence) else (threshold,) * blocks
    if given or len(values) != blocks or not all(value > 0 for value in values):
        raise UserError(
            f"threshold={threshold} decides the number of tokens; give one number above 0, or {blocks}, one "
            "per block, and neither keep nor a budget"
        )
    return values


def _planned(model: nn.Module, method: str | Factory, **budget: Any) -> Keep:
    """The schedule that :func:`visualtokens.plan` finds, as shares of the patches."""
    # Planning builds on this module, and is imported only if it is needed.
    plan = importlib.import_module("visualtokens.tune.planning").plan
    if not isinstance(method, str):
        raise UserError("a budget needs a registered method; register it, or give keep")
    found = plan(model, method=method, **budget)
    return [count / found.patches for count in found.keep]


def restore(model: nn.Module) -> nn.Module:
    """Remove the reduction from ``model``, which then computes exactly what it did before; returns it."""
    encoder = encoder_of(model)
    if not encoder.reduced:
        raise UserError(f"this {encoder.name} is not reduced, so there is nothing to restore")
    encoder.uninstall()
    del encoder.module.reduction
    for block in encoder.blocks:
        del block.reduction
    return model


def _scale(block: nn.Module, alpha: float | str) -> nn.Parameter | float:
    """α of one block (Appendix F); if learned, it starts at √D, the scale of vectors of average length."""
    if isinstance(alpha, float | int):
        return float(alpha)
    like = next(block.parameters())
    attn = attentions(block)[0]
    _, head_dim = parts_of(attn).shape(attn)
    return nn.Parameter(torch.full((), head_dim**0.5, device=like.device, dtype=like.dtype))


def _check_options(init: str, iterations: int | None, alpha: float | str, *, normalize_qk: bool) -> None:
    if init not in get_args(Init):
        raise unknown("init", init, get_args(Init))
    if iterations is not None and iterations < 0:
        raise UserError(f"iterations={iterations}; give 0 or more")
    if isinstance(alpha, str) and alpha != "learned":
        raise UserError(f"alpha={alpha!r}; give a number or 'learned'")
    if alpha != 1.0 and not normalize_qk:
        raise UserError(f"alpha={alpha!r} requires unit queries and keys; give normalize_qk=True with it")


def _check_pools(
    encoder: Encoder, method: str, schedule: Schedule, pools: Sequence[Pool], iterations: int | None
) -> None:
    """Refuse an option that the method does not have, and a reduction that leaves the head no input."""
    if iterations is not None and not any(hasattr(pool, "iterations") for pool in pools):
        raise UserError(f"iterations={iterations}; {method} does not iterate")
    drops = not all(pool.joins for pool in pools)
    if encoder.reads_patches and schedule.tokens(encoder.patches)[-1] == 0:
        raise UserError(f"keep leaves no token, but this {encoder.name} {encoder.reading}; keep at least 1")
    if drops and not encoder.can_ignore_dropped:
        raise UserError(
            f"this {encoder.name} {encoder.reading} and cannot ignore dropped patches; use a method that "
            "joins tokens, such as weighted_merge"
        )
