"""Small vision transformers of every supported kind, and images for them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import timm
import torch
from torch import Tensor, nn

# name in timm, image size, options; the comment states what only this kind has
KINDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "deit": ("deit_tiny_patch16_224", 64, {}),
    "deit3": ("deit3_small_patch16_224", 64, {}),  # layer scale, no position of the class token
    "distilled": ("deit_tiny_distilled_patch16_224", 64, {}),  # two prefix tokens
    "dinov2": ("vit_small_patch14_dinov2", 56, {}),  # patch size 14
    "registers": ("vit_small_patch14_reg4_dinov2", 56, {}),  # five prefix tokens
    "clip": ("vit_base_patch32_clip_224", 128, {}),  # norm before the blocks
    "siglip": ("vit_base_patch16_siglip_224", 64, {}),  # no prefix tokens, attention pooling
    "gap": ("vit_base_patch16_siglip_gap_224", 64, {}),  # no prefix tokens, average pooling
    "qk_norm": ("vit_tiny_patch16_224", 64, {"qk_norm": True, "init_values": 0.1}),
    "scale_norm": ("vit_tiny_patch16_224", 64, {"scale_attn_norm": True, "scale_mlp_norm": True}),
    "post_norm": ("vit_relpos_none", 64, {}),
    "parallel": ("vit_small_patch16_18x2_224", 64, {}),
    "eva": ("eva02_tiny_patch14_224", 56, {}),  # rotary positions, separate projections
    "eva_fused": ("eva_giant_patch14_224", 56, {}),  # EVA's biases
    "rope_mixed": ("vit_small_patch16_rope_mixed_224", 64, {}),  # learned rotary positions in each block
    "dinov3": ("vit_small_patch16_dinov3", 64, {}),  # rotary positions and registers
}
ROTARY = ("eva", "rope_mixed", "dinov3")
DEPTH, DIM = 3, 64
SMALL: dict[str, Any] = dict(img_size=32, patch_size=4, embed_dim=24, depth=4, num_heads=2, num_classes=5)


def build(kind: str, **options: Any) -> nn.Module:
    """A model of 16 patches, 3 blocks and width 64 in evaluation mode, the same at every call."""
    return copy.deepcopy(_build(kind, tuple(options.items())))


@functools.cache
def _build(kind: str, options: tuple[tuple[str, Any], ...]) -> nn.Module:
    torch.manual_seed(0)
    name, size, own = KINDS[kind]
    args = dict(img_size=size, depth=DEPTH, embed_dim=DIM, num_heads=4, num_classes=7) | own | dict(options)
    with torch.device("cpu"), torch.inference_mode(False):  # whatever the first caller is in
        if kind == "post_norm":
            args["block_fn"] = timm.models.vision_transformer.ResPostBlock
            return _sharpen(timm.models.VisionTransformer(**args))
        return _sharpen(timm.create_model(name, **args))


def _sharpen(model: nn.Module) -> nn.Module:
    """Larger weights and layer scales: attention far from uniform, and blocks far from the identity."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def small_vit(name: str = "deit_tiny_patch16_224", **options: Any) -> nn.Module:
    """A model of 64 patches and 4 blocks of width 24 in evaluation mode, the same at every call."""
    torch.manual_seed(0)
    model = timm.create_model(name, **(SMALL | options)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.3)
    return model


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def images(kind: str = "deit", batch: int = 2, *, seed: int = 1) -> Tensor:
    side = KINDS[kind][1]
    return randn(batch, 3, side, side, seed=seed)


def patches(model: Any) -> int:
    return model.patch_embed.num_patches


def quarters(n: int) -> list[int]:
    """A schedule that every method can keep, the convolution included."""
    return [n, n // 4, n // 16]


@torch.no_grad()
def run(model: nn.Module, x: Tensor, *, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)  # some methods sample
    return model(x)
