"""Segment: train on images and masks, evaluate, predict."""

from pathlib import Path

import numpy as np
from guide import GUIDES, follow
from PIL import Image
from shapes import photo, scenes


def check(words: list[str], output: str) -> None:
    if words[1] == "eval":
        assert "mIoU" in output


scenes(Path("scenes"))
photo(Path("photo.jpg"), "square")
narrow = "--model_args.backbone resnet18 --batch 8 --lr 0.003"
follow(
    GUIDES / "segment.md",
    replace={
        "--model_args.backbone resnet18": narrow,
        "--size 256": "--size 64",
        "--epochs 20": "--epochs 6",
    },
    after=check,
)
classes = np.asarray(Image.open("predictions/photo_classes.png"))
assert classes.shape == (64, 64)
assert 0 < (classes > 0).mean() < 0.9
assert Path("predictions/photo_overlay.png").is_file()
