"""VT-ResNet against timm's ResNet: speed, and memory as a function of the image size.

    python benchmarks/bench_vt.py --save results/bench_vt.json

The target is that fewer multiply-adds save time: the speed-up should be at least 0.95 times the ratio of
multiply-adds.
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
    """Compares images/s and multiply-adds at 224×224, batch 8."""
    comparison = compare([baseline], against=[name], size=(224, 224), batch=8, mode=mode, rounds=rounds)
    print(comparison.table(), flush=True)
    ours, theirs = (next(row for row in comparison.rows if row.name == n) for n in (name, baseline))
    expected = theirs.macs / ours.macs
    measured = ours.ratio.median
    print(f"speed-up {measured:.3f}× with {expected:.3f}× fewer multiply-adds\n", flush=True)
    return comparison.to_dict() | {
        "promised": expected,
        "reached": measured,
        "share": measured / expected,
        "target": TARGET,
    }


def memory(name: str) -> dict[str, Any]:
    """Measures the peak memory of a forward pass for each size, and its growth exponent in the pixels."""
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
