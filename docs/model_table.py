"""Write the table of the models: ``python docs/model_table.py`` writes docs/models.md."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import timm
import torch

import visualtokens
from visualtokens.bench import count_macs, count_parameters

PAGE = Path(__file__).with_name("models.md")

# Title, patterns of the model names, text. A model belongs to the first family whose pattern it matches.
FAMILIES = (
    (
        "PaCa-ViT",
        ("paca_vit_*",),
        "Patches attend to a few learned clusters (Patch-to-Cluster Attention). `_b0` to `_b2` are the "
        "models of the paper, `_32` those for 32×32 images, `_tiny`, `_small` and `_base` the later release; "
        "`_nano` is for laptops and tests.",
    ),
    (
        "PVTv2",
        ("pvt_v2_*",),
        "The baselines of PaCa-ViT that timm does not have: for 32×32 images, and with attention between all "
        "patches (`_pure`).",
    ),
    (
        "STViT",
        ("stvit_*",),
        "Each patch belongs to the nine super tokens around it, which attend to each other (Super Token "
        "Sampling). `_iso` have no convolutions besides the patch embedding and the merging.",
    ),
    ("Swin", ("swin_iso_*",), "The baselines of the isotropic STViT."),
    (
        "VT-ResNet",
        ("vt_resnet*",),
        "The last stage of a ResNet is replaced by a transformer on 16 visual tokens (Visual Transformers). "
        "`visualtokens.add_vt_stage(model)` does the same to another CNN of timm.",
    ),
    (
        "DeiT",
        ("deit_*",),
        "The narrow base models of Token Pooling. `reduced_vit` builds any timm ViT with token reduction: "
        "see [Token reduction](reduce.md).",
    ),
)

HEAD = """# Model zoo

<!-- Written by `python docs/model_table.py`; do not edit. -->

The models of this library, for `timm.create_model`, `vtok train --model` and as backbones for
[segmentation and detection](dense.md). Parameters and multiply-adds (one image of the stated size, evaluation
mode) are computed from the code; `visualtokens.bench.count_macs` computes them for other sizes.

No weights are included. `vtok convert` turns [released checkpoints](guides/share.md#convert-released-weights)
into checkpoint folders; every timm model with its pretrained weights can be
[fine-tuned](guides/finetune.md) and, if it is a ViT, [reduced](guides/speedup.md).
"""


def row(name: str) -> str:
    """The line of one model in its table."""
    with torch.device("meta"):
        model = timm.create_model(name)
    height, width = model.pretrained_cfg["input_size"][1:]
    macs = count_macs(model, (height, width)) / 1e9
    parameters = count_parameters(model) / 1e6
    return f"| `{name}` | {parameters:.2f} | {macs:.3g} | {height}×{width} |"


def family_of(name: str) -> str:
    """The title of the family of a model."""
    return next(
        title for title, patterns, _ in FAMILIES if any(fnmatch(name, pattern) for pattern in patterns)
    )


def page() -> str:
    """The page of all models."""
    parts = [HEAD]
    for title, _, text in FAMILIES:
        rows = [row(name) for name in visualtokens.list_models() if family_of(name) == title]
        header = ["| model | parameters (M) | GMACs | input |", "|---|--:|--:|--:|"]
        parts.append("\n".join([f"## {title}", text, "", *header, *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
