"""Learning from the answers of another model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.data import Preprocess


class Teacher(nn.Module):
    """A model that answers for images that were prepared for another one."""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, *, own: Preprocess, given: Preprocess) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.size = own.size
        # (x · given.std + given.mean − own.mean) / own.std, in one step
        scale = torch.tensor(given.std) / torch.tensor(own.std)
        shift = (torch.tensor(given.mean) - torch.tensor(own.mean)) / torch.tensor(own.std)
        self.register_buffer("scale", scale.view(1, 3, 1, 1), persistent=False)
        self.register_buffer("shift", shift.view(1, 3, 1, 1), persistent=False)

    def train(self, mode: bool = True) -> Teacher:
        """Stays in evaluation mode."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(B, classes)`` for ``images (B, 3, H, W)``, resized to what the teacher was trained on."""
        images = images * self.scale + self.shift
        if images.shape[2:] != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        return self.model(images)


def distillation(logits: Tensor, teacher: Tensor, *, temperature: float) -> Tensor:
    """T² · KL(softmax(teacher / T) ‖ softmax(logits / T)), mean over the images, in float32.

    T² keeps the size of the gradient whatever the temperature T.
    """
    ours = F.log_softmax(logits.float() / temperature, dim=1)
    theirs = F.log_softmax(teacher.float() / temperature, dim=1)
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * temperature**2
