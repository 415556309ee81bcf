"""VT-ResNet against timm's ResNet, interleaved, and how its memory grows with the image.

    python benchmarks/bench_vt.py --save results/bench_vt.json

The question is whether the multiply-adds that VT saves are saved in time, too: images/s should rise at
least as far as 0.95 of what the multiply-adds promise.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import timm
import torch

from visualtokens.bench import compare, machine, peak_memory

TARGET = 0.95
SIZES = ((224, 224), (320, 448), (480, 640), (800, 1216))


def speed(name: str, baseline: str, mode: str, rounds: int) -> dict[str, Any]:
    comparison = compare([baseline], against=[name], size=(224, 224), batch=8, mode=mode, rounds=rounds)
    print(comparison.table(), flush=True)
    ours, theirs = (next(row for row in comparison.rows if row.name == n) for n in (name, baseline))
    promised = theirs.macs / ours.macs
    reached = ours.ratio.median
    print(f"{reached:.3f}× the images/s where the multiply-adds promise {promised:.3f}×\n", flush=True)
    return comparison.to_dict() | {
        "promised": promised,
        "reached": reached,
        "share": reached / promised,
        "target": TARGET,
    }


def memory(name: str) -> dict[str, Any]:
    """Peak memory of one forward pass by size, and the exponent of its growth with the pixels."""
    model = timm.create_model(name).eval()
    peaks = []
    for size in SIZES:
        image = torch.randn(1, 3, *size)
        with torch.inference_mode():
            model(image)
            peaks.append(peak_memory(lambda image=image: model(image)))
    pixels = [h * w for h, w in SIZES]
    exponent = math.log(peaks[-1] / peaks[0]) / math.log(pixels[-1] / pixels[0])
    print(f"{name}: peak MB {[round(p / 1e6, 1) for p in peaks]} at {SIZES}: grows as pixels^{exponent:.3f}")
    return {"sizes": SIZES, "peak_bytes": peaks, "exponent": exponent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, help="write the result here as JSON")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    result: dict[str, Any] = {"command": "python benchmarks/bench_vt.py", "machine": machine(), "speed": {}}
    for depth in (18, 50):
        for mode in ("eager", "channels_last"):
            key = f"vt_resnet{depth}, {mode}"
            result["speed"][key] = speed(f"vt_resnet{depth}", f"resnet{depth}", mode, options.rounds)
    result["memory"] = {name: memory(name) for name in ("vt_resnet18", "vt_resnet50")}
    if options.save:
        options.save.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
