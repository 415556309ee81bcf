"""Which models can be reduced, and why others cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from timm.layers.diff_attention import DiffAttention
from timm.models import VisionTransformer
from timm.models import vision_transformer as vit
from timm.models._features import FeatureGetterNet
from timm.models.eva import Eva
from torch import nn

from visualtokens.errors import UserError
from visualtokens.reduce import attention, blocks

# What reduction replaces: a class of its own may have changed none of it.
REPLACED = ("forward", "forward_features", "forward_intermediates", "pool")

# Kinds that are known and cannot work, with the reason.
PARALLEL = "runs attention and MLP side by side, so there is no place between them to pool"
REASONS: dict[Callable[..., object], str] = {
    vit.ParallelScalingBlock.forward: PARALLEL,
    vit.DiffParallelScalingBlock.forward: PARALLEL,
    DiffAttention.forward: "subtracts attentions, so what a token receives can be negative",
}


def transformer(model: nn.Module) -> nn.Module:
    """The vision transformer in ``model``: itself, or what timm's ``features_only`` wraps."""
    return model.model if isinstance(model, FeatureGetterNet) else model


def check(model: nn.Module) -> None:
    """Refuse what cannot be reduced faithfully."""
    name = type(model).__name__
    base = next((kind for kind in (VisionTransformer, Eva) if isinstance(model, kind)), None)
    if base is None:
        raise UserError(
            f"cannot reduce {name}: it is not one of timm's VisionTransformer or Eva models"
            + ("; reduce what it wraps, then wrap again" if _wraps(model) else "")
        )
    changed = [part for part in REPLACED if getattr(type(model), part) is not getattr(base, part)]
    if changed:
        raise UserError(
            f"cannot reduce {name}: it changes {base.__name__}.{changed[0]}, which pooling replaces"
        )
    own: Any = model
    if not isinstance(own.patch_drop, (nn.Identity, type(None))):
        raise UserError(
            f"cannot reduce {name}: with patch_drop_rate the patches that tokens stand for are unknown; "
            "create it with patch_drop_rate=0"
        )
    if not hasattr(own.patch_embed, "dynamic_feat_size"):
        kind = type(own.patch_embed).__name__
        raise UserError(f"cannot reduce {name}: its {kind} does not say how many patches an image has")
    for i, block in enumerate(own.blocks):
        _check_block(name, i, block)


def _wraps(model: nn.Module) -> bool:
    """DDP, torch.compile and the like."""
    return any(isinstance(child, (VisionTransformer, Eva)) for child in model.children())


def _check_block(name: str, index: int, block: nn.Module) -> None:
    steps = blocks.halves(block)
    parts = [block] if steps is None else [a for a in steps.attentions(block) if not attention.known(a)]
    if not parts:
        return
    part = parts[0]
    reason = REASONS.get(type(part).forward, "is not a kind whose inside is known")
    raise UserError(f"cannot reduce {name}: the {type(part).__name__} of block {index} {reason}")
