"""The models that the papers compare theirs with, as far as timm has them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import timm
from torch import nn

from visualtokens.bench import count_parameters
from visualtokens.papers.counting import DEFAULT_METRICS, Size, giga, total_macs
from visualtokens.papers.entries import Build, Entry, Other, meta_model, timm_model
from visualtokens.tasks import detect
from visualtokens.tasks.timm_models import stride_in_first_convolution

# Visual Transformers, Table 8: attention in ResNets


def attentive_resnet(attention: str, depth: int, *, stride_first: bool = False) -> nn.Module:
    """A ResNet with ``se`` or ``cbam`` in every block."""
    name = f"resnet{depth}"
    model = timm.create_model(name, block_args={"attn_layer": attention})
    if stride_first:
        stride_in_first_convolution(model, name)
    return model


def resnet_with(attention: str, depth: int) -> Entry:
    """A ResNet of Table 8; those with bottlenecks also as in the paper that they are cited from.

    Its stages stride in their first convolution, which is why Table 8 marks their cost as lower.
    """
    build = functools.partial(meta_model, attentive_resnet, attention, depth)
    if depth < 50:
        return Entry(build)
    strided = functools.partial(meta_model, attentive_resnet, attention, depth, stride_first=True)
    return Entry(
        build, other={"gflops": Other("stride first", lambda _, size: giga(total_macs)(strided(), size))}
    )


# PaCa-ViT, Table 3: 32×32 images, figures of the Nested Transformer


def parameters_of_blocks(model: nn.Module, size: Size) -> float:
    """Millions of parameters without classifier and position embedding."""
    outside = [p.numel() for name, p in model.named_parameters() if name.startswith(("head.", "pos_embed"))]
    return (count_parameters(model) - sum(outside)) / 1e6


def small_images(name: str, **options: Any) -> Entry:
    """A timm model for 32×32 images of 100 classes."""
    build = timm_model(name, img_size=32, num_classes=100, **options)
    return Entry(build, other={"mparams": Other("without head", parameters_of_blocks)})


# PaCa-ViT, Table 4


def trainable_parameters(model: nn.Module, size: Size) -> float:
    """Millions of parameters of a Mask R-CNN whose stem and first stage are frozen."""
    frozen = tuple(f"backbone.body.body.{name}." for name in ("conv1", "bn1", "layer1"))
    rest = [p.numel() for name, p in model.named_parameters() if not name.startswith(frozen)]
    return sum(rest) / 1e6


def resnet_detector(depth: int) -> Entry:
    """Mask R-CNN on a ResNet, its parameters also counted without the frozen ones."""
    build: Build = functools.partial(
        meta_model, detect.create, "mask_rcnn", backbone=f"resnet{depth}", classes=80
    )
    return Entry(
        build,
        {"mparams": DEFAULT_METRICS["mparams"]},
        {"mparams": Other("trainable", trainable_parameters)},
        size=(800, 1280),
    )


# (paper, model, variant) as in published.csv
COMPETITORS: Mapping[tuple[str, str, str], Entry] = {
    **{
        ("visual-transformers", f"resnet{depth}+{attention}", "woo2018"): resnet_with(attention, depth)
        for depth in (18, 34, 50, 101)
        for attention in ("se", "cbam")
    },
    **{
        ("paca-vit", model, "imagenet-1k"): Entry(timm_model(name))
        for model, name in {
            "resnet18": "resnet18",
            "resnet50": "resnet50",
            "resnext50_32x4d": "resnext50_32x4d",
            "regnety_4g": "regnety_040",
            "deit_t": "deit_tiny_patch16_224",
            "deit_s": "deit_small_patch16_224",
            "tnt_s": "tnt_s_legacy_patch16_224",
            "swin_t": "swin_tiny_patch4_window7_224",
            "coat_lite_s": "coat_lite_small",
            "twins_svt_s": "twins_svt_small",
        }.items()
    },
    **{
        ("paca-vit", f"swin_{size[0]}", "cifar-100"): small_images(
            f"swin_{size}_patch4_window7_224", patch_size=1, window_size=4
        )
        for size in ("tiny", "small", "base")
    },
    **{
        ("paca-vit", f"deit_{size[0]}", "cifar-100"): small_images(f"deit_{size}_patch16_224", patch_size=4)
        for size in ("tiny", "small", "base")
    },
    **{("paca-vit", f"resnet{n}", "mask-rcnn-1x coco"): resnet_detector(n) for n in (18, 50)},
}
