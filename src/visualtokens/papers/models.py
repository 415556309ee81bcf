"""Which model belongs to which row of the papers' tables, and how the papers count its cost."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import timm
from torch import nn

from visualtokens.papers.competitors import COMPETITORS
from visualtokens.papers.counting import (
    DEFAULT_METRICS,
    FixedRegions,
    clustering_macs,
    giga,
    mac_ratio,
    macs_and_biases,
    macs_and_norms,
    macs_norms_and_upsampling,
    macs_without_kmeans,
    mega,
    parameter_ratio,
    parameters_without_batchnorm,
    pixel_macs,
    pooled_macs,
    pooled_macs_as_run,
    pyramid_macs,
    released_stvit_macs,
    total_macs,
)
from visualtokens.papers.entries import Entry, Other, meta_model, timm_model
from visualtokens.reduce import reduce
from visualtokens.reduce.schedule import PUBLISHED
from visualtokens.tasks import detect, segment

# Visual Transformers

# The variants of Tables 3 to 7, as options of the models.
VT_ABLATIONS: Mapping[str, dict[str, Any]] = {
    "tokenizer=pool": dict(tokenizer="pool"),
    "tokenizer=cluster": dict(tokenizer="cluster"),
    "tokenizer=filter": {},
    "recurrent=yes": {},
    "recurrent=no": dict(recurrent=False),
    "mixer=none": dict(mixer="none"),
    "mixer=graphconv": dict(mixer="graphconv"),
    "mixer=transformer": {},
    "tokens=16": {},
    "tokens=32": dict(tokens=32),
    "tokens=64": dict(tokens=64),
    "projector=yes": {},
    "projector=no": dict(projector=False),
}
WITHOUT_BATCHNORM = Other("without BatchNorm", parameters_without_batchnorm)
SEGMENTATION_CLASSES: Mapping[str, int] = {"coco-stuff": 91, "lip": 20}


def vt(depth: int, variant: str = "") -> Entry:
    """A VT-ResNet, counted in full and without its token convolutions."""
    build = timm_model(f"vt_resnet{depth}", **VT_ABLATIONS.get(variant, {}))
    if variant == "tokenizer=cluster":
        return Entry(build, {"mflops": mega(macs_without_kmeans)})
    return Entry(
        build,
        other={
            "mflops": Other("pixel MACs", mega(pixel_macs)),
            "gflops": Other("pixel MACs", giga(pixel_macs)),
            "mparams": WITHOUT_BATCHNORM,
        },
    )


def resnet(depth: int) -> Entry:
    """A ResNet, its parameters also counted without BatchNorm."""
    return Entry(timm_model(f"resnet{depth}"), other={"mparams": WITHOUT_BATCHNORM})


def vt_ratios(depth: int) -> Entry:
    """Table 1: the ResNet against its VT-ResNet, with all MACs and with pixel MACs."""
    build = timm_model(f"resnet{depth}")
    stage = (build, "layer4", "vt")
    return Entry(
        timm_model(f"vt_resnet{depth}"),
        {
            "flops_total_ratio": mac_ratio(build, "", ""),
            "flops_stage5_ratio": mac_ratio(*stage),
            "params_total_ratio": parameter_ratio(build, "", ""),
            "params_stage5_ratio": parameter_ratio(*stage),
        },
        {
            "flops_total_ratio": Other("pixel MACs", mac_ratio(build, "", "", pixel=True)),
            "flops_stage5_ratio": Other("pixel MACs", mac_ratio(*stage, pixel=True)),
        },
    )


def segmenter(head: str, depth: int, dataset: str) -> Entry:
    """``fpn`` or ``vt_fpn`` on a ResNet, whose stages stride in their first convolution as in the paper."""
    build = functools.partial(
        meta_model,
        segment.create,
        head,
        backbone=f"resnet{depth}",
        classes=SEGMENTATION_CLASSES[dataset],
        stride_first=True,
    )
    return Entry(
        build,
        {"gflops_total": giga(total_macs), "gflops_fpn": giga(pyramid_macs)},
        {
            "gflops_total": Other("pixel MACs", giga(pixel_macs)),
            "gflops_fpn": Other("pixel MACs", giga(pixel_macs, part="decoder.pyramid")),
        },
    )


# PaCa-ViT


def mask_rcnn(backbone: str) -> FixedRegions:
    """Mask R-CNN for COCO, with a fixed number of regions."""
    return FixedRegions(detect.create("mask_rcnn", backbone=backbone, classes=80))


def detector(backbone: str) -> Entry:
    """Mask R-CNN of Table 4, counted on one image of 1280×800."""
    return Entry(
        functools.partial(meta_model, mask_rcnn, backbone),
        {"mparams": DEFAULT_METRICS["mparams"], "gflops": giga(macs_and_biases)},
        {"gflops": Other("and norms", giga(macs_norms_and_upsampling))},
        size=(800, 1280),
    )


# STViT

# The two sizes of Table II.
ISO_96 = "isotropic channels=96-192-384-768 depths=2-2-6-2"
ISO_64 = "isotropic channels=64-128-320-512 depths=3-5-9-3"


def stvit(name: str) -> Entry:
    """An STViT, counted as it runs here and as released."""
    return Entry(timm_model(name), other={"gflops": Other("released code", giga(released_stvit_macs))})


def swin(name: str) -> Entry:
    """A Swin of Table II, counted with and without its norms."""
    return Entry(timm_model(name), other={"gflops": Other("and norms", giga(macs_and_norms))})


# Token Pooling: DeiT of three widths at eight levels of sparsity, with each method

# Models and methods as published.csv names them. Weighting the tokens costs nothing.
BASES = {"deit_s": "deit_small", "deit_e318": "deit_e318", "deit_e252": "deit_e252"}
METHODS = {
    "power-bert": "power_bert",
    "kmeans": "kmeans",
    "weighted-kmeans": "kmeans",
    "kmedoids": "kmedoids",
    "weighted-kmedoids": "kmedoids",
}
# Table 2 identifies its models by their cost only. These models of Tables 3 to 5 have that cost.
TABLE_2 = {
    "row1": ("deit_e252", 7),
    "row2": ("deit_e252", 6),
    "row3": ("deit_e252", 5),
    "row4": ("deit_e318", 6),
    "row5": ("deit_e252", 4),
    "row6": ("deit_e252", 3),
    "row7": ("deit_e252", 2),
    "row8": ("deit_e252", 1),
    "row9": ("deit_e318", 4),
    "row10": ("deit_e318", 3),
    "row11": ("deit_e318", 2),
    "row12": ("deit_small", 4),
    "row13": ("deit_small", 3),
    "row14": ("deit_small", 2),
    "row15": ("deit_small", 1),
    "row16": ("deit_small", 0),
}
ROW_12_POWER_BERT = ("deit_e318", 1)  # PoWER-BERT of row 12 is narrower than the other two


def reduced_deit(base: str, level: int, method: str) -> nn.Module:
    """A DeiT with the published schedule of a sparsity level."""
    name = f"{base}_patch16_224" if base == "deit_small" else base
    options: dict[str, Any] = {} if method == "power_bert" else {"init": "significance"}
    return reduce(timm.create_model(name), method, keep=f"{base}/{level}", **options)


def pooled(base: str, level: int, method: str) -> Entry:
    """A reduced DeiT, counted as in the paper and, where it clusters, as it runs here."""
    return Entry(
        functools.partial(meta_model, reduced_deit, base, level, method),
        {"gflops": giga(pooled_macs), "gflops_clustering": giga(clustering_macs)},
        {} if method == "power_bert" else {"gflops": Other("as it runs", giga(pooled_macs_as_run))},
    )


def _pooled_models() -> Iterator[tuple[tuple[str, str, str], Entry]]:
    for model, base in BASES.items():
        for level in range(len(PUBLISHED[base])):
            for name, method in METHODS.items():
                if base == "deit_small" or "kmeans" not in name:
                    yield ("token-pooling", model, f"sparsity={level} {name}"), pooled(base, level, method)
    for row, setting in TABLE_2.items():
        for name in ("power-bert", "kmedoids", "weighted-kmedoids"):
            base, level = ROW_12_POWER_BERT if (row, name) == ("row12", "power-bert") else setting
            yield ("token-pooling", row, name), pooled(base, level, METHODS[name])


# (paper, model, variant) as in published.csv
MODELS: Mapping[tuple[str, str, str], Entry] = {
    **{
        ("visual-transformers", f"resnet{depth}", variant): resnet(depth)
        for depth in (18, 34)
        for variant in ("default_recipe", "he2016", "advanced_recipe")
    },
    **{("visual-transformers", f"resnet{n}", "he2016"): resnet(n) for n in (50, 101)},
    **{("visual-transformers", f"vt_r{n}", "ratio_to_resnet"): vt_ratios(n) for n in (18, 34, 50, 101)},
    **{("visual-transformers", f"vt_r{n}", "default_recipe"): vt(n) for n in (18, 34)},
    **{("visual-transformers", f"vt_r{n}", v): vt(n, v) for n in (18, 34) for v in VT_ABLATIONS},
    **{("visual-transformers", f"vt_r{n}", "advanced_recipe"): vt(n) for n in (18, 34, 50, 101)},
    **{
        ("visual-transformers", f"{head}_r{depth}", dataset): segmenter(head, depth, dataset)
        for head in ("fpn", "vt_fpn")
        for depth in (50, 101)
        for dataset in SEGMENTATION_CLASSES
    },
    **{
        ("paca-vit", f"{family}_b{n}", "imagenet-1k"): Entry(timm_model(f"{family}_b{n}"))
        for family in ("paca_vit", "pvt_v2")
        for n in range(3)
    },
    **{
        ("paca-vit", name, "cifar-100"): Entry(timm_model(f"{name}_32", num_classes=100))
        for n in range(3)
        for name in (f"paca_vit_b{n}", f"pvt_v2_b{n}", f"pvt_v2_b{n}_pure")
    },
    **{
        ("paca-vit", f"{family}_b{n}", "mask-rcnn-1x coco"): detector(f"{family}_b{n}")
        for family in ("paca_vit", "pvt_v2")
        for n in range(3)
    },
    **{("stvit", name, ""): stvit(name) for name in ("stvit_small", "stvit_base", "stvit_large")},
    ("stvit", "stvit", f"{ISO_96} rpe"): stvit("stvit_iso_96"),
    ("stvit", "stvit", f"{ISO_64} rpe"): stvit("stvit_iso_64"),
    ("stvit", "stvit", f"{ISO_64} no-rpe"): stvit("stvit_iso_64_norpe"),
    ("stvit", "swin", f"{ISO_96} rpe"): swin("swin_iso_96"),
    ("stvit", "swin", f"{ISO_64} rpe"): swin("swin_iso_64"),
    ("stvit", "swin", f"{ISO_64} no-rpe"): swin("swin_iso_64_norpe"),
    ("stvit", "swin+global-stage3", f"{ISO_64} rpe"): swin("swin_iso_64_global"),
    # Table 2 identifies DeiT by its cost only: tiny, the two narrower ones, small.
    ("token-pooling", "row7", "deit"): Entry(timm_model("deit_tiny_patch16_224")),
    ("token-pooling", "row11", "deit"): Entry(timm_model("deit_e252")),
    ("token-pooling", "row15", "deit"): Entry(timm_model("deit_e318")),
    ("token-pooling", "row16", "deit"): Entry(timm_model("deit_small_patch16_224")),
    **dict(_pooled_models()),
    **COMPETITORS,
}
