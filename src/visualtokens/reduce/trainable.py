"""Reduced vision transformers to train: soft extraction, which learns the schedule, and ``reduced_vit``."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import timm
import torch
from timm.layers import to_2tuple
from timm.models import build_model_with_cfg, eva, generate_default_cfgs, register_model, vision_transformer
from torch import Tensor, nn

from visualtokens.errors import UserError, unknown
from visualtokens.ops.seeds import highest
from visualtokens.reduce.families import encoder_of
from visualtokens.reduce.methods import METHODS, SIGNIFICANCE, Factory, Init, Place, Pool, Pooled, Seen
from visualtokens.reduce.reduction import reduce
from visualtokens.reduce.schedule import Keep

PACE = 20.0  # default learning speed of the extraction factors, relative to the weights


class SoftExtraction(Pool):
    """Soft extraction in one block (PoWER-BERT's second stage): learns how many tokens the block needs.

    In block l, the j-th most significant token is multiplied by a learned r_l[j] ∈ [0, 1], and the loss
    includes λ Σ_l l · Σ_j r_l[j]. Every token is kept. After training, K_l = ⌈Σ_j r_l[j]⌉.

    >>> reduce(model, soft_extraction(price=1e-4), keep=1.0, carry=False)
    >>> loss = cross_entropy(model(images), labels) + extraction_cost(model)
    >>> loss.backward(); optimizer.step(); project(model)
    >>> learned_keep(model)
    """

    needs = SIGNIFICANCE

    def __init__(self, patches: int, *, price: float, pace: float) -> None:
        super().__init__()
        self.price = price  # λ · l
        self.pace = pace
        # r / pace. Adam moves every parameter by about the learning rate, so r = pace · slow moves `pace`
        # times as fast as the weights: it has to get from 1 to 0 within a few epochs.
        self.slow = nn.Parameter(torch.full((patches,), 1 / pace))

    @property
    def r(self) -> Tensor:
        """The factors ``(N,)`` in [0, 1], that of the most significant token first.

        The gradient is that of the unclamped factors, so that a factor at a bound can move back.
        """
        unclamped = self.pace * self.slow
        return unclamped + (unclamped.clamp(0, 1) - unclamped).detach()

    def cost(self) -> Tensor:
        """λ · l · Σ_j r_l[j]."""
        return self.price * self.r.sum()

    def kept(self) -> int:
        """⌈Σ_j r_l[j]⌉, tolerating the rounding error of a whole number."""
        return math.ceil(self.r.detach().double().sum().item() - 1e-4)

    @torch.no_grad()
    def project(self) -> None:
        """Clamp r to [0, 1] in place."""
        self.slow.clamp_(0, 1 / self.pace)

    def acts(self, n: int, k: int) -> bool:
        return True

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        if seen.significance is None or len(self.slow) != x.shape[1]:
            raise UserError(
                f"the factors were learned for images of {len(self.slow)} patches, this one has {x.shape[1]}"
            )
        order = highest(seen.significance.detach(), x.shape[1])  # (B, n)
        rank = order.argsort(dim=1)  # (B, n)
        tokens = x * self.r[rank].unsqueeze(2)  # (B, n, C)
        return Pooled(tokens=tokens, assignment=torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]))

    def extra_repr(self) -> str:
        return f"patches={len(self.slow)}, price={self.price:g}, pace={self.pace:g}"


def soft_extraction(*, price: float, pace: float = PACE) -> Factory:
    """The method for ``reduce``. ``price`` is λ; r learns ``pace`` times as fast as the weights."""
    if not price >= 0 or not pace > 0:
        raise UserError(f"price={price} and pace={pace}; give a price of 0 or more and a pace above 0")

    def soft(place: Place) -> Pool:
        return SoftExtraction(place.patches, price=price * (place.block + 1), pace=pace)

    return soft


def extraction_cost(model: nn.Module) -> Tensor:
    """λ Σ_l l · Σ_j r_l[j], to add to the loss."""
    costs = [pool.cost() for pool in extraction_pools(model)]
    return sum(costs[1:], costs[0])


def learned_keep(model: nn.Module) -> tuple[int, ...]:
    """K of every block; no block keeps more than the one before it."""
    pools = extraction_pools(model)
    keep = [len(pools[0].slow)]
    for pool in pools:
        keep.append(min(keep[-1], pool.kept()))
    return tuple(keep[1:])


def project(model: nn.Module) -> None:
    """Clamp all r to [0, 1], before or after every optimizer step: the gradient ignores the bounds."""
    for pool in extraction_pools(model):
        pool.project()


def extraction_pools(model: nn.Module) -> list[SoftExtraction]:
    """The soft extraction pools of a model, in block order."""
    encoder = encoder_of(model)
    found = [m for block in encoder.blocks for m in block.modules() if isinstance(m, SoftExtraction)]
    if not found:
        raise UserError(f"this {encoder.name} has no soft extraction; reduce it with soft_extraction() first")
    return found


NAME = "reduced_vit"
SOFT = "soft"  # the method name of soft extraction in model_args
BASE = "deit_small_patch16_224"
DEFAULT_KEEP = "deit_small/3"
# Fields of the pretrained config taken from the base: preprocessing, names of the first and last layers.
INHERITED = (
    *("input_size", "mean", "std", "crop_pct", "interpolation", "fixed_input_size"),
    *("first_conv", "classifier", "license"),
)

default_cfgs = generate_default_cfgs({NAME: dict(input_size=(3, 224, 224), fixed_input_size=True)})


@register_model
def reduced_vit(pretrained: bool = False, *, base: str = BASE, **options: Any) -> nn.Module:
    """A timm model ``base`` reduced by :func:`visualtokens.reduce`, to create, train, save and load by name.

    >>> timm.create_model("reduced_vit", base="deit_small_patch16_224", method="kmedoids", keep=0.3)

    ``method``, ``keep``, ``threshold``, ``carry``, ``init``, ``iterations``, ``normalize_qk`` and ``alpha``
    are options of ``reduce``; ``price`` and ``pace`` belong to ``method="soft"`` (:func:`soft_extraction`).
    All others are passed to the base. ``pretrained=True`` loads the base's pretrained weights. A checkpoint
    stores the options in its ``model_args``. Weights have the same names as in the base, so a checkpoint of
    the base can be loaded. ``img_size`` becomes the model's input size. After ``set_input_size``, a share in
    ``keep`` is one of the new number of patches; a number of tokens, and every number of ``method="conv"``,
    stays as it is.
    """
    if not timm.is_model(base):
        raise unknown("base", base, timm.list_models("*vit*"))
    cfg = timm.get_pretrained_cfg(base)
    overlay = options.pop("pretrained_cfg_overlay", None) or {}
    inherited = {name: getattr(cfg, name) for name in INHERITED} if cfg else {}
    if options.get("img_size") is not None:
        inherited["input_size"] = (3, *to_2tuple(options["img_size"]))
    if pretrained and not options.get("pretrained_cfg"):
        options["pretrained_cfg"] = cfg
    return build_model_with_cfg(
        partial(_build, base),
        NAME,
        pretrained,
        pretrained_cfg_overlay=inherited | overlay | {"architecture": NAME},
        pretrained_filter_fn=_adapt,
        feature_cfg=dict(out_indices=3, feature_cls="getter"),
        **options,
    )


def _adapt(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Resample position embeddings to the input size of the model, as timm does for the base."""
    family = eva if isinstance(encoder_of(model).module, eva.Eva) else vision_transformer
    return family.checkpoint_filter_fn(weights, model)


def _build(
    base: str,
    *,
    method: str = "weighted_kmedoids",
    keep: Keep | None = None,
    carry: bool = False,
    init: Init = "distinct",
    iterations: int | None = None,
    normalize_qk: bool = False,
    alpha: float | Literal["learned"] = 1.0,
    threshold: float | list[float] | None = None,
    price: float | None = None,
    pace: float = PACE,
    **options: Any,
) -> nn.Module:
    if method not in (*METHODS, SOFT):
        raise unknown("method", method, (*METHODS, SOFT))
    if (price is None) == (method == SOFT):
        raise UserError(f"price={price} with method={method!r}; give a price with method='soft' only")
    model = timm.create_model(base, **options)
    embed: Any = getattr(model, "patch_embed", None)
    if getattr(embed, "num_patches", None) == 0:
        least = max(embed.patch_size)
        raise UserError(f"img_size={options['img_size']} is less than a patch; give at least {least}")
    if price is not None:
        return reduce(model, soft_extraction(price=price, pace=pace), keep=1.0, carry=False)
    return reduce(
        model,
        method,
        keep=DEFAULT_KEEP if keep is None and threshold is None else keep,
        threshold=threshold,
        carry=carry,
        init=init,
        iterations=iterations,
        normalize_qk=normalize_qk,
        alpha=alpha,
    )
