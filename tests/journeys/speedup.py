"""Speed up a ViT: reduce, measure, plan, fine-tune with fewer tokens."""

from pathlib import Path

from guide import GUIDES, follow
from shapes import photos


def check(words: list[str], output: str) -> None:
    if words[1] == "reduce" and "--search" not in words:
        assert "visualtokens.reduce(model, " in output


photos(Path("photos"))
full = "deit_small_patch16_224 --weights pretrained --speedup 1.5"
small = "--model_args.patch_size 8 --model_args.embed_dim 48 --model_args.depth 4 --model_args.num_heads 3"
follow(
    GUIDES / "speedup.md",
    replace={
        "pretrained=True": "pretrained=False",
        full: "deit_tiny_patch16_224 --macs 0.7 --rounds 1",
        "--model deit_tiny_patch16_224": f"--model deit_tiny_patch16_224 --size 64 {small}",
        "--epochs 20": "--epochs 3",
        "--search_epochs 3 --epochs 3": "--search_epochs 1 --epochs 1",
    },
    after=check,
)
assert Path("curve.png").stat().st_size > 10_000
assert Path("pooled/weighted_merge/model.safetensors").is_file()
