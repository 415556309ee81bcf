"""Backbones of ours in segmentation_models_pytorch, where that is installed."""

from __future__ import annotations

import pytest
import torch

import visualtokens

smp = pytest.importorskip("segmentation_models_pytorch")

# It wants strides that double from map to map, so not VT-ResNet, whose last two are both 16.
NAMES = ["paca_vit_b0", "paca_vit_b1", "stvit_small"]


@pytest.mark.parametrize("kind", ["Unet", "UPerNet"])
@pytest.mark.parametrize("name", [n for n in NAMES if n in visualtokens.list_models()])
def test_our_backbones_are_accepted_unchanged(kind: str, name: str) -> None:
    torch.manual_seed(0)
    model = getattr(smp, kind)(encoder_name=f"tu-{name}", encoder_weights=None, classes=5)
    logits = model(torch.randn(2, 3, 64, 96))
    assert logits.shape == (2, 5, 64, 96)
    logits.square().mean().backward()
    grads = [p.grad for p in model.encoder.parameters() if p.requires_grad]
    assert sum(g is not None and bool(g.abs().any()) for g in grads) > 0.9 * len(grads)
