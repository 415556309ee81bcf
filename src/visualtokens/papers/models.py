"""Which model stands behind which row of which paper. A new family adds its entries to ``MODELS``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from torch import Tensor, nn

import visualtokens.models  # noqa: F401  registers our models with timm
from visualtokens.bench import count_macs, count_parameters, macs_by_module
from visualtokens.layers import SuperTokenAttention, TokenConv
from visualtokens.layers.tokenizers import Centroids
from visualtokens.papers import detectors, segmenters, token_pooling

Metric = Callable[[nn.Module, tuple[int, int]], float]

# How the papers' units follow from a model and the size of its input.
COUNTS: Mapping[str, Metric] = {
    "mparams": lambda model, size: count_parameters(model) / 1e6,
    "mflops": lambda model, size: count_macs(model, size) / 1e6,
    "gflops": lambda model, size: count_macs(model, size) / 1e9,
}


@dataclass(frozen=True, eq=False)
class Entry:
    """How to build a model, and how its published metrics are computed.

    ``other`` has a second way of counting for some of the metrics, ``other_name`` says which.
    """

    build: Callable[[], nn.Module]
    metrics: Mapping[str, Metric] = field(default_factory=lambda: COUNTS)
    other: Mapping[str, Metric] = field(default_factory=dict)
    other_name: str = ""
    size: tuple[int, int] | None = None  # of the input, where the table does not tell it


@functools.cache
def named(name: str, **options: Any) -> Entry:
    """A model that timm knows, ours included, with options for its constructor. One entry per model."""
    return Entry(lambda: timm.create_model(name, **options))


def macs_without(model: nn.Module, size: tuple[int, int], kind: type[nn.Module]) -> int:
    """The multiply-adds that do not happen in modules of one kind."""
    counts = macs_by_module(model, size, depth=None)
    skipped = [name for name, module in model.named_modules() if isinstance(module, kind)]
    return counts[""] - sum(counts.get(name, 0) for name in skipped)


def pixel_macs(model: nn.Module, size: tuple[int, int]) -> int:
    """Without the 1×1 convolutions of tokens, as Visual Transformers counts R50, R101 and FPN."""
    return macs_without(model, size, TokenConv)


PIXEL_COUNTS: Mapping[str, Metric] = {
    "mflops": lambda model, size: pixel_macs(model, size) / 1e6,
    "gflops": lambda model, size: pixel_macs(model, size) / 1e9,
}
# Visual Transformers does not count what k-means itself multiplies.
WITHOUT_KMEANS: Mapping[str, Metric] = {
    "mflops": lambda model, size: macs_without(model, size, Centroids) / 1e6
}

# The variants of Visual Transformers' Tables 3 to 7, as options of the models.
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


@functools.cache
def vt(depth: int, variant: str = "") -> Entry:
    """A VT-ResNet. Its multiply-adds in full, and beside them as the paper counts the deeper ones."""
    build = named(f"vt_resnet{depth}", **VT_ABLATIONS.get(variant, {})).build
    if variant == "tokenizer=cluster":
        return Entry(build, WITHOUT_KMEANS)
    return Entry(build, other=PIXEL_COUNTS, other_name="pixel MACs")


# What some tools add to the multiply-adds, per value that comes out.
EXTRA: Mapping[type[nn.Module], int] = {nn.LayerNorm: 5, nn.BatchNorm2d: 2}


def released_stvit_macs(model: nn.Module, size: tuple[int, int]) -> int:
    """As STViT's released code comes out in a tool that counts norms and pooling, too.

    That code reads and sums neighbours by convolutions with constant 3×3 kernels, nine channels for each
    of C: 81·K·C, three times for each attention with K super tokens. Ours multiplies nothing there.
    """
    extra = 0

    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal extra
        sampling = isinstance(module, SuperTokenAttention) and module.samples
        work = next((n for kind, n in EXTRA.items() if isinstance(module, kind)), int(sampling))
        extra += work * output.numel()  # one for every token that is pooled into a first super token

    hooks = [module.register_forward_hook(add) for module in model.modules()]
    try:
        counts = macs_by_module(model, size, depth=None)
    finally:
        for hook in hooks:
            hook.remove()
    for name, module in model.named_modules():
        if isinstance(module, SuperTokenAttention) and module.samples:
            dim = module.mix.proj.in_features
            extra += 3 * 81 * counts[f"{name}.mix.proj"] // dim  # K·C of the projection's K·C·C
    return counts[""] + extra


AS_RELEASED: Mapping[str, Metric] = {
    "gflops": lambda model, size: released_stvit_macs(model, size) / 1e9,
}


@functools.cache
def stvit(name: str) -> Entry:
    """An STViT. Its multiply-adds, and beside them those of the released code."""
    return Entry(named(name).build, other=AS_RELEASED, other_name="released code")


_parts = functools.cache(macs_by_module)


def vt_ratios(depth: int) -> Entry:
    """Visual Transformers' Table 1: how many times as much the ResNet has, in all and in its last stage."""

    @functools.cache
    def resnet() -> nn.Module:
        with torch.device("meta"):
            return timm.create_model(f"resnet{depth}")

    def macs(theirs: str, ours: str) -> Metric:
        return lambda model, size: _parts(resnet(), size)[theirs] / _parts(model, size)[ours]

    def parameters(theirs: str, ours: str) -> Metric:
        return lambda model, size: (
            count_parameters(resnet().get_submodule(theirs)) / count_parameters(model.get_submodule(ours))
        )

    return Entry(
        lambda: timm.create_model(f"vt_resnet{depth}"),
        {
            "flops_total_ratio": macs("", ""),
            "flops_stage5_ratio": macs("layer4", "vt"),
            "params_total_ratio": parameters("", ""),
            "params_stage5_ratio": parameters("layer4", "vt"),
        },
    )


# The two sizes of STViT's Table II.
ISO_96 = "isotropic channels=96-192-384-768 depths=2-2-6-2"
ISO_64 = "isotropic channels=64-128-320-512 depths=3-5-9-3"


@functools.cache
def pooled(setting: token_pooling.Setting) -> Entry:
    """A reduced DeiT as Token Pooling counts it; beside that, without the clustering that changes nothing."""
    published = {"gflops": token_pooling.gmacs, "gflops_clustering": token_pooling.clustering_gmacs}
    if setting.method == "power_bert":
        return Entry(setting.build, published)
    return Entry(setting.build, published, {"gflops": token_pooling.gmacs_as_run}, "as it runs")


@functools.cache
def segmented(head: str, depth: int, dataset: str) -> Entry:
    """A segmentation model of Visual Transformers. Beside its multiply-adds those that the paper counts."""
    return Entry(
        lambda: segmenters.segmenter(head, depth, dataset),
        {"gflops_total": segmenters.total_gmacs, "gflops_fpn": segmenters.pyramid_gmacs},
        {"gflops_total": segmenters.total_pixel_gmacs, "gflops_fpn": segmenters.pyramid_pixel_gmacs},
        "pixel MACs",
    )


@functools.cache
def detected(backbone: str) -> Entry:
    """Mask R-CNN as PaCa-ViT counts it."""
    return Entry(
        lambda: detectors.mask_rcnn(backbone),
        {
            "mparams": COUNTS["mparams"],
            "gflops": lambda model, size: detectors.macs_and_biases(model, size) / 1e9,
        },
        size=detectors.SIZE,
    )


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
    **{("visual-transformers", f"vt_r{n}", "ratio_to_resnet"): vt_ratios(n) for n in (18, 34, 50, 101)},
    **{("visual-transformers", f"vt_r{n}", "default_recipe"): vt(n) for n in (18, 34)},
    **{("visual-transformers", f"vt_r{n}", v): vt(n, v) for n in (18, 34) for v in VT_ABLATIONS},
    **{("visual-transformers", f"vt_r{n}", "advanced_recipe"): vt(n) for n in (18, 34, 50, 101)},
    ("paca-vit", "paca_vit_b0", "imagenet-1k"): named("paca_vit_b0"),
    ("paca-vit", "paca_vit_b1", "imagenet-1k"): named("paca_vit_b1"),
    ("paca-vit", "paca_vit_b2", "imagenet-1k"): named("paca_vit_b2"),
    ("paca-vit", "paca_vit_b0", "cifar-100"): named("paca_vit_b0_32", num_classes=100),
    ("paca-vit", "paca_vit_b1", "cifar-100"): named("paca_vit_b1_32", num_classes=100),
    ("paca-vit", "paca_vit_b2", "cifar-100"): named("paca_vit_b2_32", num_classes=100),
    ("paca-vit", "pvt_v2_b0", "imagenet-1k"): named("pvt_v2_b0"),
    ("paca-vit", "pvt_v2_b1", "imagenet-1k"): named("pvt_v2_b1"),
    ("paca-vit", "pvt_v2_b2", "imagenet-1k"): named("pvt_v2_b2"),
    ("paca-vit", "pvt_v2_b0", "cifar-100"): named("pvt_v2_b0_32", num_classes=100),
    ("paca-vit", "pvt_v2_b1", "cifar-100"): named("pvt_v2_b1_32", num_classes=100),
    ("paca-vit", "pvt_v2_b2", "cifar-100"): named("pvt_v2_b2_32", num_classes=100),
    ("paca-vit", "pvt_v2_b0_pure", "cifar-100"): named("pvt_v2_b0_pure_32", num_classes=100),
    ("paca-vit", "pvt_v2_b1_pure", "cifar-100"): named("pvt_v2_b1_pure_32", num_classes=100),
    ("paca-vit", "pvt_v2_b2_pure", "cifar-100"): named("pvt_v2_b2_pure_32", num_classes=100),
    **{
        ("visual-transformers", f"{head}_r{depth}", dataset): segmented(head, depth, dataset)
        for head in ("fpn", "vt_fpn")
        for depth in (50, 101)
        for dataset in segmenters.CLASSES
    },
    **{
        ("paca-vit", f"{family}_b{n}", "mask-rcnn-1x coco"): detected(f"{family}_b{n}")
        for family in ("paca_vit", "pvt_v2")
        for n in range(3)
    },
    **{("stvit", name, ""): stvit(name) for name in ("stvit_small", "stvit_base", "stvit_large")},
    ("stvit", "stvit", f"{ISO_96} rpe"): stvit("stvit_iso_96"),
    ("stvit", "stvit", f"{ISO_64} rpe"): stvit("stvit_iso_64"),
    ("stvit", "stvit", f"{ISO_64} no-rpe"): stvit("stvit_iso_64_norpe"),
    ("stvit", "swin", f"{ISO_96} rpe"): named("swin_iso_96"),
    ("stvit", "swin", f"{ISO_64} rpe"): named("swin_iso_64"),
    ("stvit", "swin", f"{ISO_64} no-rpe"): named("swin_iso_64_norpe"),
    ("stvit", "swin+global-stage3", f"{ISO_64} rpe"): named("swin_iso_64_global"),
    # Table 2 gives DeiT by its cost only: tiny, the two narrower ones, small.
    ("token-pooling", "row7", "deit"): named("deit_tiny_patch16_224"),
    ("token-pooling", "row11", "deit"): named("deit_e252"),
    ("token-pooling", "row15", "deit"): named("deit_e318"),
    ("token-pooling", "row16", "deit"): named("deit_small_patch16_224"),
    **{("token-pooling", name, variant): pooled(s) for name, variant, s in token_pooling.settings()},
}
