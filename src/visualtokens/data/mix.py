"""timm's Mixup and CutMix, with random numbers that the step decides."""

from __future__ import annotations

import numpy as np
import torch
from timm.data.mixup import Mixup, mixup_target
from torch import Tensor

from visualtokens.data.randomness import seeded_globals


class Mix:
    """Blends each image with its mirror place in the batch, by Mixup or CutMix, half of the time each.

    ``mixup`` and ``cutmix`` are the parameters of their Beta distributions; 0 leaves one of them out. All
    images of a batch are blended alike.
    """

    def __init__(self, *, mixup: float, cutmix: float, smoothing: float, classes: int) -> None:
        self.mixup = Mixup(mixup, cutmix, label_smoothing=smoothing, num_classes=classes)

    def __call__(self, images: Tensor, labels: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """``images (B, 3, H, W)``, changed in place, and what to expect of them: ``(B, classes)``.

        The last one of an odd number has no partner and stays as it is.
        """
        even = len(images) - len(images) % 2
        targets = mixup_target(labels, self.mixup.num_classes, 1.0, self.mixup.label_smoothing)
        if even:
            with seeded_globals(rng):
                _, mixed = self.mixup(images[:even], labels[:even])
            targets = torch.cat([mixed, targets[even:]])
        return images, targets
