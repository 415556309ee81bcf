"""What a segmentation model is trained to make small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from visualtokens.data.masks import IGNORE
from visualtokens.errors import UserError, unknown


@dataclass(frozen=True, kw_only=True)
class SegmentLoss:
    """Cross-entropy over the pixels that have a class, and ``auxiliary`` times that of the auxiliary head."""

    smoothing: float = 0.0  # how much of each label is spread over the other classes
    auxiliary: float = 0.4
    class_weights: Mapping[str, float] = field(default_factory=dict)  # of some classes; the others weigh 1

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise UserError(f"smoothing={self.smoothing} must be at least 0 and less than 1")
        if self.auxiliary < 0:
            raise UserError(f"auxiliary={self.auxiliary} must be at least 0")
        for name, weight in self.class_weights.items():
            if weight < 0:
                raise UserError(f"class_weights: {weight} of {name!r} must be at least 0")

    def weights(self, classes: Sequence[str]) -> Tensor | None:
        """The weight of every class ``(classes,)``, None if all are 1."""
        for name in self.class_weights:
            if name not in classes:
                raise unknown("class in class_weights", name, classes)
        if not self.class_weights:
            return None
        return torch.tensor([float(self.class_weights.get(name, 1.0)) for name in classes])


def loss_of(
    logits: Tensor, masks: Tensor, *, weights: Tensor | None = None, smoothing: float = 0.0
) -> Tensor:
    """Mean cross-entropy of ``logits (B, classes, H, W)`` over the pixels of ``masks (B, H, W)``, in float32.

    Pixels of class 255 are left out. With ``weights (classes,)`` it is the weighted mean. If nothing is
    left to learn from, it is 0.
    """
    targets = masks.long()
    total = F.cross_entropy(
        logits.float(),
        targets,
        weight=weights,
        ignore_index=IGNORE,
        label_smoothing=smoothing,
        reduction="sum",
    )
    asked = targets != IGNORE
    if weights is None:
        share = asked.sum().float()
    else:
        share = weights[torch.where(asked, targets, 0)].masked_fill(~asked, 0).sum()
    return total / share.clamp_min(torch.finfo(torch.float32).tiny)
