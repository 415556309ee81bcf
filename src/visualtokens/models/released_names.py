"""The parameter names of released checkpoints: tables of rules that rename them to those here and in timm."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD


class Rule(NamedTuple):
    """Renames a parameter whose whole name matches ``pattern`` to ``target``.

    In the target, ``{0}`` is the first group of the match; ``{0-}`` and ``{0+}`` are its number minus and
    plus one.
    """

    pattern: str
    target: str | None  # None drops the parameter: a constant, or used in training only
    part: int | None = None  # position of this tensor among several that are concatenated
    flatten: int | None = None  # first dimension to flatten: 1 for a 1×1 convolution → Linear, 0 → vector

    def apply(self, name: str) -> str | None:
        """Returns the new name, "" for a dropped parameter, or None if the rule does not match."""
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return None
        if self.target is None:
            return ""
        return _PLACEHOLDER.sub(lambda placeholder: _fill(placeholder, match), self.target)


_PLACEHOLDER = re.compile(r"\{(\d)([-+]?)\}")


def _fill(placeholder: re.Match[str], match: re.Match[str]) -> str:
    value = match[int(placeholder[1]) + 1]
    return str(int(value) + int(f"{placeholder[2]}1")) if placeholder[2] else value


@dataclass(frozen=True)
class Layout:
    """The parameter names of one kind of checkpoint."""

    sign: str  # pattern of a name that identifies this layout
    models: Sequence[str]  # patterns of the models, of this library or of timm, that the weights may fit
    rules: Sequence[Rule] = ()  # none: the names are those of the model
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of create_model
    cfg: Mapping[str, Any] = field(default_factory=dict)  # preprocessing, where it is not that of the model
    classifier: str = "head"  # of the model
    resizable: bool = False  # vision transformers that were released for several image sizes
    also: Sequence[str] = ()  # further models with the same names and shapes

    def accepts(self, model: str) -> bool:
        """Returns whether the weights may be those of a model of this name."""
        name = model.partition(".")[0]  # without timm's tag
        return any(fnmatch.fnmatch(name, pattern) for pattern in (*self.models, *self.also))

    def fits(self, names: Iterable[str]) -> bool:
        """Returns whether a checkpoint with these names has this layout."""
        return any(re.fullmatch(self.sign, name) for name in names)


END = r"(weight|bias)"
NORM_END = r"(weight|bias|running_mean|running_var|num_batches_tracked)"

# PaCa-ViT tiny, small and base. Stages are counted from 1; transition 1 precedes the second stage.
PACA_BLOCK, PACA_OURS = r"stage(\d)\.(\d+)\.", "stages.{0-}.blocks.{1}."
PACA_CLUSTERING, PACA_OUR_CLUSTERING = (
    rf"{PACA_BLOCK}attn\.clustering\.clustering\.",
    PACA_OURS + "attn.clustering.",
)
PACA_COMMON = [
    Rule(rf"patch_embed\.proj\.0\.{END}", "stages.0.embed.first.{0}"),
    Rule(rf"patch_embed\.proj\.1\.{END}", "stages.0.embed.conv.{0}"),
    Rule(rf"patch_embed\.norm\.{END}", "stages.0.embed.norm.{0}"),
    Rule(rf"transition(\d)\.proj\.{END}", "stages.{0}.embed.conv.{1}"),
    Rule(rf"transition(\d)\.norm\.{END}", "stages.{0}.embed.norm.{1}"),
    Rule(rf"norm(\d)\.{END}", "stages.{0-}.norm.{1}"),
    Rule(rf"head\.{END}", "head.{0}"),
    Rule(rf"{PACA_BLOCK}norm([12])_before\.{END}", PACA_OURS + "norm{2}.{3}"),
    Rule(rf"{PACA_BLOCK}attn\.cluster_norm\.{END}", PACA_OURS + "attn.norm.{2}"),
    Rule(rf"{PACA_BLOCK}attn\.(q|proj)\.{END}", PACA_OURS + "attn.{2}.{3}"),
    Rule(rf"{PACA_BLOCK}attn\.k\.{END}", PACA_OURS + "attn.kv.{2}", part=0),
    Rule(rf"{PACA_BLOCK}attn\.v\.{END}", PACA_OURS + "attn.kv.{2}", part=1),
    Rule(rf"{PACA_BLOCK}mlp\.(fc[12])\.{END}", PACA_OURS + "ffn.{2}.{3}"),
    Rule(rf"{PACA_BLOCK}mlp\.dwconv\.dwconv\.{END}", PACA_OURS + "ffn.dwconv.{2}"),
]
PACA_CONV = [
    Rule(rf"{PACA_CLUSTERING}0\.{END}", PACA_OUR_CLUSTERING + "conv.{2}"),
    Rule(rf"{PACA_CLUSTERING}2\.weight", PACA_OUR_CLUSTERING + "mix.weight", flatten=1),
    Rule(rf"{PACA_CLUSTERING}2\.bias", PACA_OUR_CLUSTERING + "mix.bias"),
    Rule(rf"{PACA_CLUSTERING}4\.weight", PACA_OUR_CLUSTERING + "assign.weight", flatten=1),
]
PACA_MLP = [
    Rule(rf"{PACA_CLUSTERING}0\.{END}", PACA_OUR_CLUSTERING + "fc.{2}"),
    Rule(rf"{PACA_CLUSTERING}2\.{END}", PACA_OUR_CLUSTERING + "assign.{2}"),
]
PACA = [
    Layout(rf"{PACA_CLUSTERING}4\.weight", ["paca_vit_*"], [*PACA_COMMON, *PACA_CONV]),
    Layout(rf"{PACA_CLUSTERING}2\.bias", ["paca_vit_*"], [*PACA_COMMON, *PACA_MLP]),
]

# STViT small, base and large. A stage ends with the downsampling that here begins the next stage.
STVIT_BLOCK, STVIT_OURS = r"layers\.(\d)\.blocks\.(\d+)\.", "stages.{0}.blocks.{1}."
STVIT_RULES = [
    Rule(rf"patch_embed\.proj\.(\d+)\.{NORM_END}", "stages.0.embed.{0}.{1}"),
    Rule(rf"layers\.(\d)\.downsample\.proj\.([01])\.{NORM_END}", "stages.{0+}.embed.{1}.{2}"),
    Rule(rf"{STVIT_BLOCK}pos_embed\.conv\.{END}", STVIT_OURS + "cpe.{2}"),
    Rule(rf"{STVIT_BLOCK}norm1\.norm\.{END}", STVIT_OURS + "norm1.{2}"),
    Rule(rf"{STVIT_BLOCK}norm2\.{NORM_END}", STVIT_OURS + "norm2.{2}"),
    Rule(rf"{STVIT_BLOCK}attn\.(un)?fold\.weights", None),  # identity kernels
    Rule(
        rf"{STVIT_BLOCK}attn\.stoken_refine\.(qkv|proj)\.weight",
        STVIT_OURS + "attn.mix.{2}.weight",
        flatten=1,
    ),
    Rule(rf"{STVIT_BLOCK}attn\.stoken_refine\.(qkv|proj)\.bias", STVIT_OURS + "attn.mix.{2}.bias"),
    Rule(rf"{STVIT_BLOCK}gamma_([12])", STVIT_OURS + "scale{2}.gamma", flatten=0),
    Rule(rf"{STVIT_BLOCK}mlp2\.(fc[12])\.weight", STVIT_OURS + "ffn.{2}.weight", flatten=1),
    Rule(rf"{STVIT_BLOCK}mlp2\.(fc[12])\.bias", STVIT_OURS + "ffn.{2}.bias"),
    Rule(rf"{STVIT_BLOCK}mlp2\.conv\.conv\.{END}", STVIT_OURS + "ffn.dwconv.{2}"),
    Rule(rf"proj\.{END}", "final.0.{0}"),
    Rule(rf"norm\.{NORM_END}", "final.1.{0}"),
    Rule(rf"head\.{END}", "head.{0}"),
]
STVIT = [
    Layout(
        rf"{STVIT_BLOCK}attn\.stoken_refine\.qkv\.weight",
        ["stvit_*"],
        STVIT_RULES,
        options={"border": "released"},
    )
]

# DeiT has timm's names; DeiT III calls the scales of its blocks gamma.
SAME = Rule(r"(.+)", "{0}")
DEIT = [
    Layout(
        r"blocks\.0\.gamma_1",
        ["deit3_*"],
        [Rule(r"blocks\.(\d+)\.gamma_([12])", "blocks.{0}.ls{1}.gamma"), SAME],
    ),
    Layout(r"blocks\.0\.attn\.qkv\.weight", ["deit_*"]),
]

# PVTv2 b0 to b5. Stages are counted from 1; patch_embed1 precedes the first one.
PVT_BLOCK, PVT_OURS = r"block(\d)\.(\d+)\.", "stages.{0-}.blocks.{1}."
PVT_V2 = [
    Layout(
        r"patch_embed1\.proj\.weight",
        ["pvt_v2_*"],
        [
            Rule(rf"patch_embed1\.(proj|norm)\.{END}", "patch_embed.{0}.{1}"),
            Rule(rf"patch_embed(\d)\.(proj|norm)\.{END}", "stages.{0-}.downsample.{1}.{2}"),
            Rule(rf"norm(\d)\.{END}", "stages.{0-}.norm.{1}"),
            Rule(rf"{PVT_BLOCK}(norm[12])\.{END}", PVT_OURS + "{2}.{3}"),
            Rule(rf"{PVT_BLOCK}attn\.(q|kv|proj|sr|norm)\.{END}", PVT_OURS + "attn.{2}.{3}"),
            Rule(rf"{PVT_BLOCK}mlp\.(fc[12])\.{END}", PVT_OURS + "mlp.{2}.{3}"),
            Rule(rf"{PVT_BLOCK}mlp\.dwconv\.dwconv\.{END}", PVT_OURS + "mlp.dwconv.{2}"),
            Rule(rf"head\.{END}", "head.{0}"),
        ],
    )
]

# Swin tiny, small, base and large. A stage ends with the downsampling that in timm begins the next stage.
SWIN_MODELS = ["swin_tiny_*", "swin_small_*", "swin_base_*", "swin_large_*"]
SWIN_BLOCK, SWIN_OURS = r"layers\.(\d)\.blocks\.(\d+)\.", "layers.{0}.blocks.{1}."
SWIN_CONSTANTS = r"(attn_mask|attn\.relative_position_index)"
SWIN = [
    Layout(
        r"layers\.0\.downsample\.reduction\.weight",
        SWIN_MODELS,
        [
            Rule(rf"patch_embed\.(proj|norm)\.{END}", "patch_embed.{0}.{1}"),
            Rule(rf"{SWIN_BLOCK}{SWIN_CONSTANTS}", None),
            Rule(
                rf"{SWIN_BLOCK}attn\.relative_position_bias_table",
                SWIN_OURS + "attn.relative_position_bias_table",
            ),
            Rule(rf"{SWIN_BLOCK}(norm[12]|attn\.qkv|attn\.proj|mlp\.fc[12])\.{END}", SWIN_OURS + "{2}.{3}"),
            Rule(rf"layers\.(\d)\.downsample\.(norm|reduction)\.{END}", "layers.{0+}.downsample.{1}.{2}"),
            Rule(rf"norm\.{END}", "norm.{0}"),
            Rule(rf"head\.{END}", "head.fc.{0}"),
        ],
        classifier="head.fc",
        also=["swin_iso_*"],
    )
]

# torchvision. Its models see images of 224 pixels from the middle of 256.
TV_CFG = dict(
    mean=IMAGENET_DEFAULT_MEAN,
    std=IMAGENET_DEFAULT_STD,
    crop_pct=0.875,
    interpolation="bilinear",
    crop_mode="center",
)
TV_BLOCK, TV_OURS = r"encoder\.layers\.encoder_layer_(\d+)\.", "blocks.{0}."
TV_VIT = [
    Rule(r"class_token", "cls_token"),
    Rule(r"encoder\.pos_embedding", "pos_embed"),
    Rule(rf"conv_proj\.{END}", "patch_embed.proj.{0}"),
    Rule(rf"{TV_BLOCK}ln_([12])\.{END}", TV_OURS + "norm{1}.{2}"),
    Rule(rf"{TV_BLOCK}self_attention\.in_proj_{END}", TV_OURS + "attn.qkv.{1}"),
    Rule(rf"{TV_BLOCK}self_attention\.out_proj\.{END}", TV_OURS + "attn.proj.{1}"),
    Rule(rf"{TV_BLOCK}mlp\.(?:0|linear_1)\.{END}", TV_OURS + "mlp.fc1.{1}"),
    Rule(rf"{TV_BLOCK}mlp\.(?:3|linear_2)\.{END}", TV_OURS + "mlp.fc2.{1}"),
    Rule(rf"encoder\.ln\.{END}", "norm.{0}"),
    Rule(rf"heads\.head\.{END}", "head.{0}"),
]


def _tv_swin_stage(stage: int) -> Iterator[Rule]:
    """Yields the rules of a stage of torchvision's Swin: blocks at 2i + 1, then the downsampling."""
    block, ours = rf"features\.{2 * stage + 1}\.(\d+)\.", f"layers.{stage}.blocks." + "{0}."
    table = r"attn\.relative_position_bias_table"
    yield Rule(rf"{block}attn\.relative_position_index", None)
    yield Rule(rf"{block}({table})", ours + "{1}")
    yield Rule(rf"{block}(norm[12]|attn\.qkv|attn\.proj)\.{END}", ours + "{1}.{2}")
    yield Rule(rf"{block}mlp\.0\.{END}", ours + "mlp.fc1.{1}")
    yield Rule(rf"{block}mlp\.3\.{END}", ours + "mlp.fc2.{1}")
    yield Rule(
        rf"features\.{2 * stage + 2}\.(norm|reduction)\.{END}", f"layers.{stage + 1}.downsample." + "{0}.{1}"
    )


TV_SWIN = [
    Rule(rf"features\.0\.0\.{END}", "patch_embed.proj.{0}"),
    Rule(rf"features\.0\.2\.{END}", "patch_embed.norm.{0}"),
    *(rule for stage in range(4) for rule in _tv_swin_stage(stage)),
    Rule(rf"norm\.{END}", "norm.{0}"),
    Rule(rf"head\.{END}", "head.fc.{0}"),
]
TORCHVISION = [
    Layout(
        r"encoder\.pos_embedding",
        [
            "vit_base_patch16_224",
            "vit_base_patch32_224",
            "vit_large_patch16_224",
            "vit_large_patch32_224",
            "vit_huge_patch14_224",
        ],
        TV_VIT,
        cfg=TV_CFG,
        resizable=True,
    ),
    Layout(
        r"features\.1\.0\.attn\.relative_position_bias_table",
        SWIN_MODELS,
        TV_SWIN,
        cfg=TV_CFG | dict(interpolation="bicubic", crop_pct=224 / 232),
        classifier="head.fc",
        also=["swin_iso_*"],
    ),
    Layout(
        r"layer1\.0\.conv1\.weight",
        [
            "resnet18",
            "resnet34",
            "resnet50",
            "resnet101",
            "resnet152",
            "resnext50_32x4d",
            "resnext101_32x8d",
            "resnext101_64x4d",
            "wide_resnet50_2",
            "wide_resnet101_2",
        ],
        cfg=TV_CFG,
        classifier="fc",
    ),
]

FAMILIES: Mapping[str, Sequence[Layout]] = {
    "paca": PACA,
    "stvit": STVIT,
    "deit": DEIT,
    "pvt_v2": PVT_V2,
    "swin": SWIN,
    "torchvision": TORCHVISION,
}
