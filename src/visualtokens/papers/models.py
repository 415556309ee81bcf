"""Which model stands behind which row of which paper. A new family adds its entries to ``MODELS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import timm
from timm.models.pvt_v2 import OverlapPatchEmbed
from torch import nn

import visualtokens.models  # noqa: F401  registers our models with timm
from visualtokens.bench import count_macs, count_parameters

Metric = Callable[[nn.Module, tuple[int, int]], float]

# How the papers' units follow from a model and the size of its input.
COUNTS: Mapping[str, Metric] = {
    "mparams": lambda model, size: count_parameters(model) / 1e6,
    "mflops": lambda model, size: count_macs(model, size) / 1e6,
    "gflops": lambda model, size: count_macs(model, size) / 1e9,
}


@dataclass(frozen=True, eq=False)
class Entry:
    """How to build a model, and how its published metrics are computed."""

    build: Callable[[], nn.Module]
    metrics: Mapping[str, Metric] = field(default_factory=lambda: COUNTS)


def named(name: str, **options: Any) -> Entry:
    """A model that timm knows, ours included, with options for its constructor."""
    return Entry(lambda: timm.create_model(name, **options))


def pvt_v2_32(name: str, *, reductions: tuple[int, ...]) -> nn.Module:
    """timm's PVTv2 with the stem that PaCa's Table 1 uses for 32×32 images: stride 1, 2, 2, 1."""
    model = timm.create_model(name, num_classes=100, sr_ratios=reductions)
    width = model.patch_embed.proj.out_channels
    model.patch_embed = OverlapPatchEmbed(patch_size=3, stride=1, in_chans=3, embed_dim=width)
    model.patch_embed.apply(model._init_weights)
    model.stages[3].downsample.proj.stride = (1, 1)
    return model


def small_pvt(name: str) -> Entry:
    return Entry(lambda: pvt_v2_32(name, reductions=(4, 2, 1, 1)))


def pure_pvt(name: str) -> Entry:
    """Without spatial reduction: every patch attends to every other."""
    return Entry(lambda: pvt_v2_32(name, reductions=(1, 1, 1, 1)))


RESNET18, RESNET34 = named("resnet18"), named("resnet34")

# (paper, model, variant) as in published.csv
MODELS: Mapping[tuple[str, str, str], Entry] = {
    ("visual-transformers", "resnet18", "default_recipe"): RESNET18,
    ("visual-transformers", "resnet18", "he2016"): RESNET18,
    ("visual-transformers", "resnet18", "advanced_recipe"): RESNET18,
    ("visual-transformers", "resnet34", "default_recipe"): RESNET34,
    ("visual-transformers", "resnet34", "he2016"): RESNET34,
    ("visual-transformers", "resnet34", "advanced_recipe"): RESNET34,
    ("visual-transformers", "resnet50", "he2016"): named("resnet50"),
    ("visual-transformers", "resnet101", "he2016"): named("resnet101"),
    ("paca-vit", "paca_vit_b0", "imagenet-1k"): named("paca_vit_b0"),
    ("paca-vit", "paca_vit_b1", "imagenet-1k"): named("paca_vit_b1"),
    ("paca-vit", "paca_vit_b2", "imagenet-1k"): named("paca_vit_b2"),
    ("paca-vit", "paca_vit_b0", "cifar-100"): named("paca_vit_b0_32", num_classes=100),
    ("paca-vit", "paca_vit_b1", "cifar-100"): named("paca_vit_b1_32", num_classes=100),
    ("paca-vit", "paca_vit_b2", "cifar-100"): named("paca_vit_b2_32", num_classes=100),
    ("paca-vit", "pvt_v2_b0", "imagenet-1k"): named("pvt_v2_b0"),
    ("paca-vit", "pvt_v2_b1", "imagenet-1k"): named("pvt_v2_b1"),
    ("paca-vit", "pvt_v2_b2", "imagenet-1k"): named("pvt_v2_b2"),
    ("paca-vit", "pvt_v2_b0", "cifar-100"): small_pvt("pvt_v2_b0"),
    ("paca-vit", "pvt_v2_b1", "cifar-100"): small_pvt("pvt_v2_b1"),
    ("paca-vit", "pvt_v2_b2", "cifar-100"): small_pvt("pvt_v2_b2"),
    ("paca-vit", "pvt_v2_b0_pure", "cifar-100"): pure_pvt("pvt_v2_b0"),
    ("paca-vit", "pvt_v2_b1_pure", "cifar-100"): pure_pvt("pvt_v2_b1"),
    ("paca-vit", "pvt_v2_b2_pure", "cifar-100"): pure_pvt("pvt_v2_b2"),
    ("stvit", "swin", "isotropic channels=96-192-384-768 depths=2-2-6-2 rpe"): named(
        "swin_tiny_patch4_window7_224"
    ),
    # Table 2 gives DeiT by its cost only: tiny, the two narrower ones, small.
    ("token-pooling", "row7", "deit"): named("deit_tiny_patch16_224"),
    ("token-pooling", "row11", "deit"): named("deit_small_patch16_224", embed_dim=252, num_heads=6),
    ("token-pooling", "row15", "deit"): named("deit_small_patch16_224", embed_dim=318, num_heads=6),
    ("token-pooling", "row16", "deit"): named("deit_small_patch16_224"),
}
