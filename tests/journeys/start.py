"""Getting started: train on a folder of photos, evaluate, predict, explain."""

from pathlib import Path

from guide import ROOT, follow
from shapes import photo, photos


def check(words: list[str], output: str) -> None:
    if words[1] == "eval":
        accuracy = float(output.split()[1].rstrip("%"))
        assert accuracy > 60, output
    if words[1] == "predict":
        assert "circle" in output


photos(Path("photos"))
photo(Path("new/photo.jpg"))
follow(ROOT / "docs" / "start.md", replace={"vtok demo --out demo\n": ""}, after=check)
assert Path("sheet.png").stat().st_size > 5_000
assert "circle" in Path("why.html").read_text()
assert Path("gallery.html").read_text().count("<img") > 20
