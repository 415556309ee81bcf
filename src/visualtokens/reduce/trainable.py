"""Reduced vision transformers to train: ``reduced_vit``, and soft extraction, which learns the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import timm
import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from visualtokens.errors import UserError, unknown
from visualtokens.reduce.blocks import transformer
from visualtokens.reduce.methods import SIGNIFICANCE, Init, Pool, Seen
from visualtokens.reduce.reduction import METHODS, Place, reduce
from visualtokens.reduce.schedule import Keep
from visualtokens.reduce.state import Pooled

# Soft extraction (PoWER-BERT's second stage): learning how many tokens every block needs.
#
# In block l the j-th most significant token is multiplied by a learned r_l[j] ∈ [0, 1], and the loss adds
# λ Σ_l l · Σ_j r_l[j]. What is left of the mass says how many tokens to keep: K_l = ⌈Σ_j r_l[j]⌉.
#
# >>> reduce(model, soft_extraction(price=1e-4), keep=1.0, carry=False)
# >>> loss = cross_entropy(model(images), labels) + extraction_cost(model)
# >>> loss.backward(); optimizer.step(); project(model)
# >>> learned_keep(model)

PACE = 20.0


class SoftExtraction(Pool):
    """Multiplies the tokens of one block by their r. All go on, and each stands for itself."""

    needs = SIGNIFICANCE

    def __init__(self, patches: int, *, price: float, pace: float) -> None:
        super().__init__()
        self.price = price  # λ · l
        self.pace = pace
        # r / pace. An optimizer such as Adam moves every parameter by about the learning rate, so this
        # moves r `pace` times as fast as the weights: it has to get from 1 to 0 in a few epochs.
        self.slow = nn.Parameter(torch.full((patches,), 1 / pace))

    @property
    def r(self) -> Tensor:
        """``(N,)``, the factor of the most significant token first.

        In [0, 1], with the gradient of the unclamped one: at a bound it must be able to come back.
        """
        free = self.pace * self.slow
        return free + (free.clamp(0, 1) - free).detach()

    def cost(self) -> Tensor:
        """λ · l · Σ_j r_l[j]."""
        return self.price * self.r.sum()

    def kept(self) -> int:
        """⌈Σ_j r_l[j]⌉; what rounding added to a whole number does not count."""
        return math.ceil(self.r.detach().double().sum().item() - 1e-4)

    @torch.no_grad()
    def project(self) -> None:
        """Put r back into [0, 1]: it must not wander away where the clamp hides it."""
        self.slow.clamp_(0, 1 / self.pace)

    def acts(self, n: int, k: int) -> bool:
        return True

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        if seen.significance is None or len(self.slow) != x.shape[1]:
            raise UserError(
                f"the factors were learned for images of {len(self.slow)} patches, this one has {x.shape[1]}"
            )
        order = seen.significance.detach().argsort(dim=1, descending=True, stable=True)  # (B, n)
        rank = order.argsort(dim=1)  # (B, n)
        tokens = x * self.r[rank].unsqueeze(2)  # (B, n, C)
        same = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        return Pooled(tokens=tokens, assignment=same)

    def extra_repr(self) -> str:
        return f"patches={len(self.slow)}, price={self.price:g}, pace={self.pace:g}"


def soft_extraction(*, price: float, pace: float = PACE) -> Callable[[Place], Pool]:
    """The method to give to ``reduce``. ``price`` is λ; r moves ``pace`` times as fast as the weights."""
    if not price >= 0 or not pace > 0:
        raise UserError(f"price={price} and pace={pace} must be positive numbers")

    def soft(place: Place) -> Pool:
        return SoftExtraction(place.patches, price=price * (place.block + 1), pace=pace)

    return soft


def extraction_cost(model: nn.Module) -> Tensor:
    """λ Σ_l l · Σ_j r_l[j], to be added to the loss."""
    costs = [pool.cost() for pool in pools(model)]
    return sum(costs[1:], costs[0])


def learned_keep(model: nn.Module) -> tuple[int, ...]:
    """K of every block; no block can keep more than the one before it."""
    blocks = pools(model)
    keep = [len(blocks[0].slow)]
    for pool in blocks:
        keep.append(min(keep[-1], pool.kept()))
    return tuple(keep[1:])


def project(model: nn.Module) -> None:
    """Put all r back into [0, 1], after or before every step of the optimizer."""
    for pool in pools(model):
        pool.project()


def pools(model: nn.Module) -> list[SoftExtraction]:
    """Those of a model, block by block."""
    vit: Any = transformer(model)
    found = [m for m in vit.blocks.modules() if isinstance(m, SoftExtraction)]
    if not found:
        raise UserError(
            f"this {type(vit).__name__} does not extract softly; reduce it with soft_extraction()"
        )
    return found


# A reduced vision transformer under a name of its own, so that it can be trained, saved and loaded.
#
# >>> timm.create_model("reduced_vit", base="deit_small_patch16_224", method="kmedoids", keep="deit_small/3")
#
# A checkpoint of it names the reduction in its ``model_args``, so loading it gives the reduced model.
# The weights are those of the base under the same names: a run can start from a checkpoint of the base.
#


NAME = "reduced_vit"
SOFT = "soft"  # the method of the search
BASE = "deit_small_patch16_224"
# What a reduced model has of its base: how images are prepared, how its first and last weights are called.
INHERITED = (
    *("input_size", "mean", "std", "crop_pct", "interpolation", "fixed_input_size"),
    *("first_conv", "classifier", "license"),
)

default_cfgs = generate_default_cfgs({NAME: dict(input_size=(3, 224, 224), fixed_input_size=True)})


@register_model
def reduced_vit(pretrained: bool = False, *, base: str = BASE, **options: Any) -> nn.Module:
    """The model ``base`` of timm with ``method`` and ``keep`` of :func:`visualtokens.reduce`.

    The other options are those of the base. ``pretrained=True`` takes the base's pretrained weights.
    """
    if not timm.is_model(base):
        raise unknown("base", base, timm.list_models("*vit*"))
    cfg = timm.get_pretrained_cfg(base)
    given = options.pop("pretrained_cfg_overlay", None) or {}
    inherited = {name: getattr(cfg, name) for name in INHERITED} if cfg else {}
    if pretrained and not options.get("pretrained_cfg"):
        options["pretrained_cfg"] = cfg
    return build_model_with_cfg(
        partial(_build, base),
        NAME,
        pretrained,
        pretrained_cfg_overlay=inherited | given | {"architecture": NAME},
        feature_cfg=dict(out_indices=3, feature_cls="getter"),
        **options,
    )


def _build(
    base: str,
    *,
    method: str = "weighted_kmedoids",
    keep: Keep = "deit_small/3",
    carry: bool = False,
    init: Init = "distinct",
    iterations: int | None = None,
    price: float | None = None,
    pace: float = PACE,
    **options: Any,
) -> nn.Module:
    """``price`` and ``pace`` are for the method ``"soft"``, which learns what to keep."""
    if (price is None) == (method == SOFT):
        raise UserError(f"price={price} with method={method!r}; give it with method='soft', and only then")
    model = timm.create_model(base, **options)
    if price is not None:
        return reduce(model, soft_extraction(price=price, pace=pace), keep=1.0, carry=False)
    if method not in METHODS:
        raise unknown("method", method, [*METHODS, SOFT])
    return reduce(model, method, keep=keep, carry=carry, init=init, iterations=iterations)
