"""Share a model and bring weights, with a hub on this machine in place of the Hugging Face Hub."""

import os
import sys
from pathlib import Path

import torch
import torchvision
from guide import GUIDES, ROOT, follow, run
from shapes import SHAPES, photo, photos

sys.path.insert(0, str(ROOT / "tests" / "hub"))
from server import TOKEN, serve

photos(Path("set"), side=32)
photo(Path("photo.jpg"), side=32)
options = {"--model": "paca_vit_nano", "--data": "folder:set", "--out": "run", "--epochs": "2"}
run("vtok", "train", *(word for option in options.items() for word in option))
torch.save(torchvision.models.resnet18().state_dict(), "resnet18.pth")


def check(words: list[str], output: str) -> None:
    if words[1] == "predict" and words[-1] == "hf-hub:me/flowers":
        assert any(shape in output for shape in SHAPES)


with serve() as hub:
    os.environ |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": "cache", "HF_HUB_DISABLE_XET": "1"}
    follow(GUIDES / "share.md", after=check)
    files = hub.repositories["me/flowers"]
assert set(files) == {path.name for path in Path("shared").iterdir()}
assert files["model.safetensors"] == Path("run/model.safetensors").read_bytes()
assert Path("resnet/config.json").is_file()
