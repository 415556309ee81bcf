"""How each paper counts the cost of a model.

What the papers call a FLOP is one multiply-add (MAC). Only shapes matter, so the models may live on the meta
device.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from visualtokens.bench import count_parameters, macs_by_module
from visualtokens.layers import SuperTokenAttention, TokenConv
from visualtokens.layers.tokenizers import Centroids
from visualtokens.reduce import macs as reduced_macs
from visualtokens.reduce.methods import KMeans, KMedoids
from visualtokens.tasks.detect.detectors import BOX_SIDE, MASK_SIDE, MaskRCNN

Size = tuple[int, int]  # height and width of the image
Metric = Callable[[nn.Module, Size], float]


class Counts(NamedTuple):
    """What one forward pass on one image costs, by the name of the submodule; ``""`` is the whole model."""

    macs: Mapping[str, int]
    outputs: Mapping[str, int]  # number of output values


@functools.cache
def counts(model: nn.Module, size: Size) -> Counts:
    """Counts of all submodules, in one pass per model and size."""
    outputs: Counter[str] = Counter()

    def count_outputs(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor):
                outputs[name] += output.numel()

        return hook

    hooks = [module.register_forward_hook(count_outputs(name)) for name, module in model.named_modules()]
    try:
        return Counts(macs_by_module(model, size, depth=None), outputs)
    finally:
        for hook in hooks:
            hook.remove()


def total_macs(model: nn.Module, size: Size) -> int:
    """MACs of the whole model."""
    return counts(model, size).macs[""]


def macs_without(
    model: nn.Module, size: Size, excluded: type[nn.Module] | tuple[()], *, part: str = ""
) -> int:
    """MACs of one part of the model, not counting submodules of the type ``excluded``."""
    macs, prefix = counts(model, size).macs, f"{part}." if part else ""
    names = [name for name, module in model.named_modules() if isinstance(module, excluded)]
    return macs[part] - sum(macs.get(name, 0) for name in names if name.startswith(prefix))


def giga(count: Callable[..., int], **options: Any) -> Metric:
    """The metric that gives ``count`` in GMACs."""
    return lambda model, size: count(model, size, **options) / 1e9


def mega(count: Callable[..., int], **options: Any) -> Metric:
    """The metric that gives ``count`` in MMACs."""
    return lambda model, size: count(model, size, **options) / 1e6


DEFAULT_METRICS: Mapping[str, Metric] = {
    "mparams": lambda model, size: count_parameters(model) / 1e6,
    "mflops": mega(total_macs),
    "gflops": giga(total_macs),
}


# Visual Transformers


def pixel_macs(model: nn.Module, size: Size, *, part: str = "") -> int:
    """MACs without the 1×1 convolutions of tokens, as the paper counts VT-ResNet-50, -101 and VT-FPN."""
    return macs_without(model, size, TokenConv, part=part)


def macs_without_kmeans(model: nn.Module, size: Size) -> int:
    """MACs without k-means, as the paper counts the clustering tokenizer."""
    return macs_without(model, size, Centroids)


def pyramid_macs(model: nn.Module, size: Size) -> int:
    """MACs of a segmenter's pyramid, the "FPN FLOPs" of Tables 9 and 10."""
    return counts(model, size).macs["decoder.pyramid"]


def parameters_without_batchnorm(model: nn.Module, size: Size) -> float:
    """Millions of parameters without those of BatchNorm, as the paper counts its ResNets and Table 6."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    return (count_parameters(model) - sum(count_parameters(norm) for norm in norms)) / 1e6


def mac_ratio(resnet: Callable[[], nn.Module], theirs: str, ours: str, *, pixel: bool = False) -> Metric:
    """Table 1: MACs of a part of the ResNet divided by those of a part of its VT-ResNet.

    ``pixel``: without the token convolutions.
    """
    count = pixel_macs if pixel else functools.partial(macs_without, excluded=())
    return lambda model, size: counts(resnet(), size).macs[theirs] / count(model, size, part=ours)


def parameter_ratio(resnet: Callable[[], nn.Module], theirs: str, ours: str) -> Metric:
    """Table 1: parameters of a part of the ResNet divided by those of a part of its VT-ResNet."""
    return lambda model, size: (
        count_parameters(resnet().get_submodule(theirs)) / count_parameters(model.get_submodule(ours))
    )


# STViT

# Some tools also count this many operations per output value.
NORM_COSTS: Mapping[type[nn.Module], int] = {nn.LayerNorm: 5, nn.BatchNorm2d: 2}


def macs_and_norms(model: nn.Module, size: Size) -> int:
    """MACs, plus the operations of norms that some tools count."""
    macs, outputs = counts(model, size)
    total = macs[""]
    for name, module in model.named_modules():
        total += sum(n for norm, n in NORM_COSTS.items() if isinstance(module, norm)) * outputs[name]
    return total


def released_stvit_macs(model: nn.Module, size: Size) -> int:
    """MACs of STViT's released code, in a tool that also counts norms and pooling.

    The released code gathers and sums neighbours by convolutions with constant 3×3 kernels and nine output
    channels for each of C: 81·K·C MACs, three times per attention with K super tokens. Ours are copies.
    """
    macs, outputs = counts(model, size)
    total = macs_and_norms(model, size)
    for name, module in model.named_modules():
        if isinstance(module, SuperTokenAttention) and module.samples:
            total += outputs[name]  # average pooling into the initial super tokens
            # the projection of K tokens has K·C·C MACs
            total += 3 * 81 * macs[f"{name}.mix.proj"] // module.mix.proj.in_features
    return total


# PaCa-ViT's Table 4: Mask R-CNN on one image, with biases

BOX_REGIONS, MASK_REGIONS = 1000, 100  # the maximum per image
LEVELS = 4  # of the pyramid


class FixedRegions(nn.Module):
    """A Mask R-CNN with a fixed number of regions, so that its cost does not depend on the image."""

    def __init__(self, detector: MaskRCNN) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor) -> None:
        heads, width = self.detector.roi_heads, self.detector.backbone.out_channels
        levels = self.detector.backbone(images)
        self.detector.rpn.head(list(levels.values()))
        heads.box_predictor(heads.box_head(images.new_empty(BOX_REGIONS, width, BOX_SIDE, BOX_SIDE)))
        heads.mask_predictor(heads.mask_head(images.new_empty(MASK_REGIONS, width, MASK_SIDE, MASK_SIDE)))


def macs_and_biases(model: nn.Module, size: Size) -> int:
    """MACs, plus one addition per output value of each convolution with a bias."""
    macs, outputs = counts(model, size)
    return macs[""] + sum(
        outputs[name]
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d) and module.bias is not None
    )


def macs_norms_and_upsampling(model: nn.Module, size: Size) -> int:
    """MACs and biases, plus two operations per value of a LayerNorm and one per value of an upsampled map.

    The rule is a fit: it gives all six printed figures of Table 4. The authors' tool is not known.
    """
    outputs = counts(model, size).outputs
    norms = sum(outputs[name] for name, module in model.named_modules() if isinstance(module, nn.LayerNorm))
    # a coarser map is upsampled to the size of each lateral map but the coarsest
    laterals = [outputs[f"detector.backbone.fpn.inner_blocks.{level}"] for level in range(LEVELS)]
    return macs_and_biases(model, size) + 2 * norms + sum(laterals[:-1])


# Token Pooling, by the formula for reduced ViTs


def skipped_clustering_macs(model: Any) -> int:
    """MACs that the paper counts for clustering that changes nothing, and that is skipped here.

    K-medoids: all distances, also in blocks that keep all tokens or none. K-means: two iterations of
    distances in blocks that keep all tokens.
    """
    present, macs = model.patch_embed.num_patches, 0
    for block, k in zip(model.blocks, model.reduction.schedule.tokens(present), strict=True):
        pool = block.reduction.pool
        if isinstance(pool, KMedoids) and k in (0, present):
            macs += present**2 * model.embed_dim
        if isinstance(pool, KMeans) and k == present:
            macs += 2 * present * k * model.embed_dim
        present = k
    return macs


def skipped_query_macs(model: Any) -> int:
    """What the paper counts, and the library does not compute: queries of patches that are then dropped.

    Where a block keeps no patch, only its class token attends.
    """
    dim, prefix, total = model.embed_dim, model.num_prefix_tokens, 0
    tokens = model.reduction.schedule.tokens(model.patch_embed.num_patches)
    for n, k in zip((model.patch_embed.num_patches, *tokens), tokens, strict=False):
        if k == 0:
            total += n * (2 * dim**2 + 2 * (prefix + n) * dim)  # query and output projections, attention
    return total


def pooled_macs(model: nn.Module, size: Size) -> int:
    """MACs of a reduced ViT as Tables 2 to 5 count them."""
    return reduced_macs(model).total + skipped_clustering_macs(model) + skipped_query_macs(model)


def clustering_macs(model: nn.Module, size: Size) -> int:
    """MACs of the clustering alone, as Tables 3 to 5 count them."""
    return sum(reduced_macs(model).pooling) + skipped_clustering_macs(model)


def pooled_macs_as_run(model: nn.Module, size: Size) -> int:
    """MACs of a reduced ViT as it runs here."""
    return reduced_macs(model).total
