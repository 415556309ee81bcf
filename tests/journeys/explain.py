"""Explain: one image, a folder, from Python, a reduced ViT, and faithfulness."""

from pathlib import Path

from guide import GUIDES, follow
from shapes import photo, photos


def check(words: list[str], output: str) -> None:
    if "--faithfulness" in words:
        assert "deletion" in output
        assert "random" in output


photos(Path("photos"))
photo(Path("photo.jpg"))
follow(
    GUIDES / "explain.md",
    replace={
        "--epochs 30": "--epochs 4",
        "pretrained=True": "pretrained=False",
        "--faithfulness": "--faithfulness --methods clusters rollout random --images 4 --steps 4",
    },
    after=check,
)
for name in ("why.html", "gallery.html", "why.png", "why_vit.html", "curves.png"):
    assert Path(name).stat().st_size > 5_000, name
