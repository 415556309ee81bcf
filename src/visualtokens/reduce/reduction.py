"""Put token reduction into a vision transformer of timm, and take it out again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from timm.layers.attention_pool import AttentionPoolPrr
from torch import nn

from visualtokens.errors import UserError, unknown
from visualtokens.reduce import forward as passes
from visualtokens.reduce.blocks import KINDS, REPLACED, BlockReduction, check, reduced_forward, transformer
from visualtokens.reduce.methods import ConvPool, Idle, Init, KMeans, KMedoids, Merge, Pool, Select, halved
from visualtokens.reduce.schedule import Keep, Schedule

Method = Literal[
    "kmeans",
    "weighted_kmeans",
    "kmedoids",
    "weighted_kmedoids",
    "power_bert",
    "importance",
    "random",
    "merge",
    "conv",
]
METHODS: tuple[Method, ...] = get_args(Method)
# Updates unless told otherwise. Those of k-means are the paper's; of k-medoids it says nothing, and more
# than one changes the features of a pretrained model by less than one image differs from the next.
ITERATIONS = {"kmeans": 3, "weighted_kmeans": 3, "kmedoids": 1, "weighted_kmedoids": 1}


class Place(NamedTuple):
    """Where a pool is to work."""

    block: int
    dim: int  # C
    patches: int  # of an image of the model's own size


@dataclass(frozen=True)
class Reduction:
    """How a model is reduced; a reduced model has it as ``model.reduction``."""

    method: str
    schedule: Schedule
    carry: bool


def reduce(
    model: nn.Module,
    method: Method | Callable[[Place], Pool],
    *,
    keep: Keep,
    carry: bool = True,
    init: Init = "distinct",
    iterations: int | None = None,
    normalize_qk: bool = False,
    alpha: float | Literal["learned"] = 1.0,
) -> nn.Module:
    """Make a vision transformer of timm work on fewer tokens; changes ``model`` and returns it.

    Between the attention and the MLP of every block, its n tokens become at most K. Prefix tokens (class,
    distillation, registers) always stay and are not counted. The weights stay as they are, and
    :func:`restore` takes everything back.

    | method | what becomes of the tokens |
    |---|---|
    | ``kmeans``, ``weighted_kmeans`` | means of clusters (Eq. 13–15), weighted by significance |
    | ``kmedoids``, ``weighted_kmedoids`` | medoids of clusters stay (Eq. 16–18) |
    | ``power_bert`` | the most significant stay |
    | ``importance`` | drawn by significance, without replacement |
    | ``random`` | any stay |
    | ``merge`` | the most similar pairs become means (bipartite soft matching) |
    | ``conv`` | 2×2 become one (stride 2); halves the grid as soon as K tokens fit |

    The significance of a token is the attention it receives, over all heads and queries. ``method`` may
    also be a function that makes a :class:`~visualtokens.reduce.Pool` for each block.

    ``keep`` says how many stay: a list with one number per block, the share that is left in the end
    (``0.5``), a negative number that every block gives up (``-13``), or a published schedule
    (``"deit_small/3"``); see
    :meth:`Schedule.of <visualtokens.reduce.Schedule.of>`.

    ``carry``: a token that stands for s patches counts s times in later attentions (Appendix E); good for
    a model that was trained without pooling, not needed for one that is trained with it. ``init``: where
    clustering starts, at the most significant tokens or at random ones. ``iterations``: its updates.
    ``normalize_qk``: unit queries and keys, their products times ``alpha``, which may be ``"learned"``, one
    per block, from √D on (Appendix F); for models that are trained so.

    New parameters, beside the model's own: ``blocks.*.reduction.alpha`` where α is learned and
    ``blocks.*.reduction.pool.weight`` of ``conv``. A reduced model can be reduced anew.
    """
    vit: Any = transformer(model)
    check(vit)
    _check_options(alpha, normalize_qk=normalize_qk)
    plan = Schedule.of(keep, len(vit.blocks))
    if method == "conv":
        plan, make = _convolutions(vit, plan)
    else:
        make = partial(_pool, method, init, iterations) if isinstance(method, str) else method
    pools = [make(Place(i, vit.embed_dim, vit.patch_embed.num_patches)) for i in range(len(vit.blocks))]
    _check_head(vit, plan, pools)
    if "reduction" in vit.__dict__:
        restore(vit)
    for block, pool in zip(vit.blocks, pools, strict=True):
        scale = _scale(block, alpha) if normalize_qk else None
        block.reduction = BlockReduction(pool, prefix=vit.num_prefix_tokens, carry=carry, alpha=scale)
        block.reduction.train(block.training)
        block.forward = partial(reduced_forward, block)
    name = method if isinstance(method, str) else getattr(method, "__name__", type(method).__name__)
    vit.reduction = Reduction(name, plan, carry)
    for part in REPLACED:
        if part != "pool" or not all(pool.joins for pool in pools):
            setattr(vit, part, partial(getattr(passes, part), vit))
    return model


def restore(model: nn.Module) -> nn.Module:
    """Take the reduction out of ``model`` again: bit for bit what it computed before. Returns ``model``."""
    vit: Any = transformer(model)
    if "reduction" not in vit.__dict__:
        raise UserError(f"this {type(vit).__name__} is not reduced, so there is nothing to restore")
    for part in (*REPLACED, "reduction"):
        vit.__dict__.pop(part, None)
    for block in vit.blocks:
        del block.forward, block.reduction
    return model


def _pool(method: str, init: Init, iterations: int | None, place: Place) -> Pool:
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    if init not in get_args(Init):
        raise unknown("init", init, get_args(Init))
    if iterations is not None and (iterations < 0 or method not in ITERATIONS):
        reason = "give 0 or more" if method in ITERATIONS else f"{method} does not iterate"
        raise UserError(f"iterations={iterations}; {reason}")
    if method in ("power_bert", "importance", "random"):
        return Select(method)
    if method == "merge":
        return Merge()
    kind = KMeans if method.endswith("kmeans") else KMedoids
    updates = ITERATIONS[method] if iterations is None else iterations
    return kind(weighted=method.startswith("weighted"), init=init, iterations=updates)


def _convolutions(vit: Any, plan: Schedule) -> tuple[Schedule, Callable[[Place], Pool]]:
    """The schedule in counts that halving the model's grid can make, and the pools that make them."""
    cells: tuple[int, int] = tuple(vit.patch_embed.grid_size)
    counts, halving = [], []
    for wanted in plan.tokens(math.prod(cells)):
        fits = wanted <= math.prod(halved(cells)) < math.prod(cells)
        cells = halved(cells) if fits else cells
        counts.append(math.prod(cells))
        halving.append(fits)

    def make(place: Place) -> Pool:
        like = next(vit.blocks[place.block].parameters())
        return ConvPool(place.dim, like=like) if halving[place.block] else Idle()

    return Schedule(tuple(counts)), make


def _scale(block: nn.Module, alpha: float | str) -> nn.Parameter | float:
    """Appendix F's α of one block; learned, it starts at √D, as if the vectors had their usual length."""
    if isinstance(alpha, float | int):
        return float(alpha)
    like = next(block.parameters())
    attn = KINDS[type(block).forward].attentions(block)[0]
    return nn.Parameter(torch.full((), attn.head_dim**0.5, device=like.device, dtype=like.dtype))


def _check_options(alpha: float | str, *, normalize_qk: bool) -> None:
    if isinstance(alpha, str) and alpha != "learned":
        raise UserError(f"alpha={alpha!r}; give a number or 'learned'")
    if alpha != 1.0 and not normalize_qk:
        raise UserError(f"alpha={alpha!r} is for unit queries and keys; give normalize_qk=True with it")


def _check_head(vit: Any, plan: Schedule, pools: Sequence[Pool]) -> None:
    """Refuse what would leave the head without anything to read."""
    name, reads = type(vit).__name__, vit.global_pool
    if plan.tokens(vit.patch_embed.num_patches)[-1] == 0 and (reads != "token" or not vit.num_prefix_tokens):
        raise UserError(
            f"keep leaves no token, but this {name} with global_pool={reads!r} reads them; keep at least 1"
        )
    if isinstance(vit.attn_pool, AttentionPoolPrr) and not all(pool.joins for pool in pools):
        raise UserError(
            f"global_pool='prr' of this {name} cannot leave dropped patches out; use a method that joins"
        )
