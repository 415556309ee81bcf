"""Small vision transformers of every kind, and images for them."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import Tensor, nn

# name in timm, image size, options: each is there for what it has that others have not.
KINDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "deit": ("deit_tiny_patch16_224", 64, {}),
    "deit3": ("deit3_small_patch16_224", 64, {}),  # layer scale, no position of the class token
    "distilled": ("deit_tiny_distilled_patch16_224", 64, {}),  # two prefix tokens
    "dinov2": ("vit_small_patch14_dinov2", 56, {"num_classes": 5}),  # layer scale, patch 14
    "registers": ("vit_small_patch14_reg4_dinov2", 56, {"num_classes": 5}),  # five prefix tokens
    "clip": ("vit_base_patch32_clip_224", 128, {}),  # norm before the blocks
    "siglip": ("vit_base_patch16_siglip_224", 64, {}),  # no prefix, attention pooling
    "gap": ("vit_base_patch16_siglip_gap_224", 64, {}),  # no prefix, average
    "qk_norm": ("vit_tiny_patch16_224", 64, {"qk_norm": True, "init_values": 0.1}),
    "scale_norm": ("vit_tiny_patch16_224", 64, {"scale_attn_norm": True, "scale_mlp_norm": True}),
    "post_norm": ("vit_relpos_none", 64, {}),
    "parallel": ("vit_small_patch16_18x2_224", 64, {"num_heads": 6}),
    "eva": ("eva02_tiny_patch14_224", 56, {}),  # rotary positions, separate projections
    "eva_fused": ("eva_giant_patch14_224", 56, {"embed_dim": 64, "num_heads": 4}),  # EVA's biases
    "rope_mixed": ("vit_small_patch16_rope_mixed_224", 64, {}),  # learned rotary positions of each block
    "dinov3": ("vit_small_patch16_dinov3", 64, {}),  # rotary positions, registers
}
ROTARY = ("eva", "rope_mixed", "dinov3")
DEPTH = 3


def build(kind: str, **options: Any) -> nn.Module:
    """A model with weights large enough that its attention is far from uniform."""
    torch.manual_seed(0)
    if kind == "post_norm":
        base = dict(block_fn=timm.models.vision_transformer.ResPostBlock, embed_dim=64, num_heads=4)
        base |= dict(img_size=64, depth=DEPTH, num_classes=7)
        model = timm.models.VisionTransformer(**(base | options))
    else:
        name, size, own = KINDS[kind]
        model = timm.create_model(
            name, **({"img_size": size, "depth": DEPTH, "num_classes": 7} | own | options)
        )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def size_of(kind: str) -> int:
    return KINDS[kind][1]


def images(kind: str = "deit", batch: int = 2, *, seed: int = 1) -> Tensor:
    side = size_of(kind)
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(seed))


def patches(model: Any) -> int:
    return model.patch_embed.num_patches


@torch.no_grad()
def run(model: nn.Module, x: Tensor, *, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)  # some methods draw
    return model(x)
