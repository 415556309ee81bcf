"""Fine-tune: from weights in a folder and in a file, a linear probe, evaluation and prediction."""

import shutil
from pathlib import Path

from guide import GUIDES, follow, run
from shapes import photo, photos

SMALL = "--model paca_vit_nano --size 32 --batch 16"
accuracies = {}


def check(words: list[str], output: str) -> None:
    if words[1] == "train":
        accuracies[words[words.index("--out") + 1]] = float(output.split("accuracy ")[1].split("%")[0])


photos(Path("photos"), side=32)
photos(Path("other"), side=32)
photo(Path("photo.jpg"), side=32)
(Path("photos/val") / "circle").rename("photos/val/cat")
(Path("photos/train") / "circle").rename("photos/train/cat")
# What would be downloaded: a model that was trained on the same shapes.
run("vtok", "train", *SMALL.split(), "--data", "folder:other", "--out", "pretrained", "--epochs", "12")
shutil.copy("pretrained/model.safetensors", "weights.safetensors")
follow(
    GUIDES / "finetune.md",
    replace={
        "--model vit_small_patch16_224": SMALL,
        "--pretrained": "--init pretrained",
        "--epochs 10 --lr 1e-4 --layer_decay 0.75": "--epochs 2 --lr 5e-4 --layer_decay 0.75",
        "--epochs 20": "--epochs 2",
        "--epochs 5": "--epochs 1",
    },
    after=check,
)
assert min(accuracies.values()) > 60, accuracies
