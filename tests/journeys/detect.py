"""Detect: train on COCO annotations, evaluate, predict."""

from pathlib import Path

from guide import GUIDES, follow
from shapes import objects, photo


def check(words: list[str], output: str) -> None:
    if words[1] == "eval":
        assert "AP" in output


objects(Path("objects"))
photo(Path("photo.jpg"), "square")
small = " ".join(
    f"--model_args.{name} {value}" for name, value in (("width", 32), ("hidden", 64), ("regions", 50))
)
follow(
    GUIDES / "detect.md",
    replace={
        "--model_args.backbone resnet18": f"--model_args.backbone resnet18 {small} --batch 4",
        "--size 480": "--size 64",
        "--epochs 12": "--epochs 2",
        "--score 0.6": "--score 0.01",
    },
    after=check,
)
assert Path("predictions/photo_objects.png").is_file()
