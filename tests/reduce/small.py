"""A vision transformer that is small enough for tests."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import nn

ARGS: dict[str, Any] = dict(img_size=32, patch_size=4, embed_dim=24, depth=4, num_heads=2, num_classes=5)


def small_vit(name: str = "deit_tiny_patch16_224", *, seed: int = 0, **changes: Any) -> nn.Module:
    """64 patches, 4 blocks, in evaluation mode, with weights large enough to tell tokens apart."""
    torch.manual_seed(seed)
    model = timm.create_model(name, **(ARGS | changes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.3)
    return model
