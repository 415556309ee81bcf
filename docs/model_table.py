"""Write the list of `vtok models` as a page: ``python docs/model_table.py`` writes docs/models.md.

``python -m visualtokens.cli.models`` counts parameters and multiply-adds again.
"""

from __future__ import annotations

from pathlib import Path

from visualtokens.cli.models import Size, read_sizes

PAGE = Path(__file__).with_name("models.md")

# The families, with what their models do.
FAMILIES = {
    "PaCa-ViT": "Patches attend to a few learned clusters (Patch-to-Cluster Attention). `_b0` to `_b2` are "
    "the models of the paper, `_32` those for 32×32 images, `_tiny`, `_small` and `_base` the later release; "
    "`_nano` is for laptops and tests.",
    "PVTv2": "The baselines of PaCa-ViT that timm does not have: for 32×32 images, and with attention "
    "between all patches (`_pure`).",
    "STViT": "Each patch belongs to the nine super tokens around it, which attend to each other (Super Token "
    "Sampling). `_iso` have no convolutions besides the patch embedding and the merging.",
    "Swin": "The baselines of the isotropic STViT.",
    "VT-ResNet": "The last stage of a ResNet is replaced by a transformer on 16 visual tokens (Visual "
    "Transformers). `visualtokens.add_vt_stage(model)` does the same to another timm CNN.",
    "ResNet": "The baseline of VT-ResNets for 32×32 images, which timm does not have; `width` scales its "
    "channels.",
    "DeiT": "The narrow base models of Token Pooling. `reduced_vit` builds any timm ViT with token "
    "reduction: see [Token reduction](reduce.md).",
}

HEAD = """# Model zoo

<!-- Written by `python docs/model_table.py`; do not edit. -->

The models of this library, for `timm.create_model`, `vtok train --model` and as backbones for
[segmentation and detection](dense.md). Parameters and multiply-adds (one square image of the stated side,
evaluation mode) are computed from the code; `visualtokens.bench.count_macs` computes them for other sizes.

No weights are included. `vtok convert` turns [released checkpoints](guides/share.md#convert-released-weights)
into checkpoint folders; every timm model with its pretrained weights can be
[fine-tuned](guides/finetune.md) and, if it is a ViT, [reduced](guides/speedup.md).
"""


def row(size: Size) -> str:
    """The line of one model in its table."""
    released = "released" if size.weights else "–"
    counts = f"{size.parameters / 1e6:.2f} | {size.macs / 1e9:.3g}"
    return f"| `{size.name}` | {counts} | {_pixels(size)} | {released} |"


def _pixels(size: Size) -> str:
    """The side of the images, which are square unless stated otherwise."""
    return str(size.height) if size.height == size.width else f"{size.height}×{size.width}"


def page() -> str:
    """The page of all models."""
    parts = [HEAD]
    for family, text in FAMILIES.items():
        rows = [row(size) for size in read_sizes().values() if size.family == family]
        header = ["| model | params (M) | GMACs | input | weights |", "|---|--:|--:|--:|---|"]
        parts.append("\n".join([f"## {family}", text, "", *header, *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
