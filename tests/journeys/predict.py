"""Predict many images: printed, saved, continued, by several processes, with a damaged file among them."""

import csv
import json
from pathlib import Path

from guide import GUIDES, follow, run
from shapes import SHAPES, photo, photos

photos(Path("set"), side=32)
for name in ("photos/a.jpg", "photos/b.jpg", "photos/more/c.jpg", "photo.jpg", "other.jpg"):
    photo(Path(name), side=32)
options = {"--model": "paca_vit_nano", "--data": "folder:set", "--out": "run", "--epochs": "2"}
run("vtok", "train", *(word for option in options.items() for word in option))
follow(GUIDES / "predict.md", replace={"--nproc-per-node 4": "--nproc-per-node 2"})

with open("results.csv", encoding="utf-8", newline="") as file:
    rows = list(csv.DictReader(file))
assert [row["image"] for row in rows] == ["photos/a.jpg", "photos/b.jpg", "photos/more/c.jpg"]
assert all(row["label"] in SHAPES for row in rows)
documents = [json.loads(line) for line in Path("many.jsonl").read_text().splitlines()]
assert [document["image"] for document in documents] == [row["image"] for row in rows]

photo(Path("photos/d.jpg"), side=32)  # is added; the damaged one is reported, and the exit code is 1
Path("photos/z.jpg").write_bytes(b"no picture")
run("vtok", "predict", "photos/", "--checkpoint", "run", "--out", "results.csv", "--top", "3", code=1)
with open("results.csv", encoding="utf-8", newline="") as file:
    later = {row["image"]: row for row in csv.DictReader(file)}
assert {row["image"]: row for row in rows}.items() <= later.items()
assert later["photos/d.jpg"]["label"] in SHAPES
assert "not an image" in later["photos/z.jpg"]["error"]
