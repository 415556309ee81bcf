"""Names in the checkpoints of STViT small, base and large."""

from __future__ import annotations

from visualtokens.convert.rules import Family, Layout, Rule

BLOCK = r"layers\.(\d)\.blocks\.(\d+)\."
OURS = "stages.{0}.blocks.{1}."
END = r"(weight|bias)"
NORM_END = r"(weight|bias|running_mean|running_var|num_batches_tracked)"

RULES = [
    Rule(rf"patch_embed\.proj\.(\d+)\.{NORM_END}", "stages.0.embed.{0}.{1}"),
    # A stage ends with the transition to the next one; ours begins with it.
    Rule(rf"layers\.(\d)\.downsample\.proj\.([01])\.{NORM_END}", "stages.{0+}.embed.{1}.{2}"),
    Rule(rf"{BLOCK}pos_embed\.conv\.{END}", OURS + "cpe.{2}"),
    Rule(rf"{BLOCK}norm1\.norm\.{END}", OURS + "norm1.{2}"),
    Rule(rf"{BLOCK}norm2\.{NORM_END}", OURS + "norm2.{2}"),
    Rule(rf"{BLOCK}attn\.(un)?fold\.weights", None),  # identity kernels
    Rule(rf"{BLOCK}attn\.stoken_refine\.(qkv|proj)\.weight", OURS + "attn.mix.{2}.weight", flatten=1),
    Rule(rf"{BLOCK}attn\.stoken_refine\.(qkv|proj)\.bias", OURS + "attn.mix.{2}.bias"),
    Rule(rf"{BLOCK}gamma_([12])", OURS + "scale{2}.gamma", flatten=0),
    Rule(rf"{BLOCK}mlp2\.(fc[12])\.weight", OURS + "ffn.{2}.weight", flatten=1),
    Rule(rf"{BLOCK}mlp2\.(fc[12])\.bias", OURS + "ffn.{2}.bias"),
    Rule(rf"{BLOCK}mlp2\.conv\.conv\.{END}", OURS + "ffn.dwconv.{2}"),
    Rule(rf"proj\.{END}", "final.0.{0}"),
    Rule(rf"norm\.{NORM_END}", "final.1.{0}"),
    Rule(rf"head\.{END}", "head.{0}"),
]

STVIT = Family(
    models="stvit_*",
    layouts=[Layout(sign=rf"{BLOCK}attn\.stoken_refine\.qkv\.weight", rules=RULES)],
    options={"border": "released"},
)
