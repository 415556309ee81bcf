"""Names in the checkpoints of PaCa-ViT tiny, small and base."""

from __future__ import annotations

from visualtokens.convert.rules import Family, Layout, Rule

BLOCK = r"stage(\d)\.(\d+)\."
OURS = "stages.{0-}.blocks.{1}."
END = r"(weight|bias)"

COMMON = [
    Rule(rf"patch_embed\.proj\.0\.{END}", "stages.0.embed.first.{0}"),
    Rule(rf"patch_embed\.proj\.1\.{END}", "stages.0.embed.conv.{0}"),
    Rule(rf"patch_embed\.norm\.{END}", "stages.0.embed.norm.{0}"),
    # Stages are counted from 1, and transition 1 leads into the second.
    Rule(rf"transition(\d)\.proj\.{END}", "stages.{0}.embed.conv.{1}"),
    Rule(rf"transition(\d)\.norm\.{END}", "stages.{0}.embed.norm.{1}"),
    Rule(rf"norm(\d)\.{END}", "stages.{0-}.norm.{1}"),
    Rule(rf"head\.{END}", "head.{0}"),
    Rule(rf"{BLOCK}norm([12])_before\.{END}", OURS + "norm{2}.{3}"),
    Rule(rf"{BLOCK}attn\.cluster_norm\.{END}", OURS + "attn.norm.{2}"),
    Rule(rf"{BLOCK}attn\.(q|proj)\.{END}", OURS + "attn.{2}.{3}"),
    Rule(rf"{BLOCK}attn\.k\.{END}", OURS + "attn.kv.{2}", part=0),
    Rule(rf"{BLOCK}attn\.v\.{END}", OURS + "attn.kv.{2}", part=1),
    Rule(rf"{BLOCK}mlp\.(fc[12])\.{END}", OURS + "ffn.{2}.{3}"),
    Rule(rf"{BLOCK}mlp\.dwconv\.dwconv\.{END}", OURS + "ffn.dwconv.{2}"),
]

CLUSTERING = rf"{BLOCK}attn\.clustering\.clustering\."
OUR_CLUSTERING = OURS + "attn.clustering."

CONV = [
    Rule(rf"{CLUSTERING}0\.{END}", OUR_CLUSTERING + "conv.{2}"),
    Rule(rf"{CLUSTERING}2\.weight", OUR_CLUSTERING + "mix.weight", flatten=1),
    Rule(rf"{CLUSTERING}2\.bias", OUR_CLUSTERING + "mix.bias"),
    Rule(rf"{CLUSTERING}4\.weight", OUR_CLUSTERING + "assign.weight", flatten=1),
]
MLP = [
    Rule(rf"{CLUSTERING}0\.{END}", OUR_CLUSTERING + "fc.{2}"),
    Rule(rf"{CLUSTERING}2\.{END}", OUR_CLUSTERING + "assign.{2}"),
]

PACA = Family(
    models="paca_vit_*",
    layouts=[
        Layout(sign=rf"{CLUSTERING}4\.weight", rules=[*COMMON, *CONV]),
        Layout(sign=rf"{CLUSTERING}2\.bias", rules=[*COMMON, *MLP]),
    ],
)
