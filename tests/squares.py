"""A small dataset in COCO's layout: bright and dark squares on grey, and one image without any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

HEIGHT, WIDTH = 64, 80
CLASSES = ["bright", "dark", "never there"]


def write_squares(root: Path, *, train: int = 16, val: int = 4) -> str:
    """Write the images and annotations; gives the name of the dataset."""
    rng = np.random.default_rng(0)
    (root / "annotations").mkdir(parents=True)
    for split, count in (("train", train), ("val", val)):
        (root / f"{split}2017").mkdir()
        document: dict[str, Any] = {"images": [], "annotations": []}
        document["categories"] = [{"id": i + 1, "name": name} for i, name in enumerate(CLASSES)]
        for number in range(count):
            pixels = rng.normal(128, 8, (HEIGHT, WIDTH, 3))
            name = f"{number}.png"
            document["images"].append({"id": number, "file_name": name, "width": WIDTH, "height": HEIGHT})
            for place in range(0 if number == 0 else 2):
                side = int(rng.integers(20, 34))
                left = 40 * place + int(rng.integers(0, 40 - side + 1))
                top = int(rng.integers(0, HEIGHT - side + 1))
                kind = int(rng.integers(2))
                pixels[top : top + side, left : left + side] += 90 - 180 * kind
                right, bottom = left + side, top + side
                document["annotations"].append(
                    {
                        "id": len(document["annotations"]) + 1,
                        "image_id": number,
                        "category_id": kind + 1,
                        "bbox": [left, top, side, side],
                        "segmentation": [[left, top, right, top, right, bottom, left, bottom]],
                        "area": side * side,
                        "iscrowd": 0,
                    }
                )
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / f"{split}2017" / name)
        (root / f"annotations/instances_{split}2017.json").write_text(json.dumps(document))
    return f"coco:{root}"
