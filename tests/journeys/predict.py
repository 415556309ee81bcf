"""Predict for many images: as text, as JSON, from Python, with a damaged file among them."""

import json
from pathlib import Path

from guide import GUIDES, follow, run
from shapes import photo, photos


def check(words: list[str], output: str) -> None:
    if "--json" in words:
        document = json.loads(output)
        assert len(document["predictions"]) == 3
        assert document["unreadable"] == []


photos(Path("set"), side=32)
for name in ("photos/a.jpg", "photos/b.jpg", "photos/c.jpg", "photo.jpg"):
    photo(Path(name), side=32)
Path("other.jpg").write_bytes(b"no picture")
options = {"--model": "paca_vit_nano", "--data": "folder:set", "--out": "run", "--epochs": "2"}
run("vtok", "train", *(word for option in options.items() for word in option))
follow(GUIDES / "predict.md", after=check)
