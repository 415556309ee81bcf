"""Speed of exported models in onnxruntime: DeiT-S with fewer tokens, and STViT-S against torch.compile.

    python benchmarks/bench_onnx.py --work FOLDER [--batches 8 1] [--only deit] --save results/bench_onnx.json

The files are exported into ``--work`` first; those that are there already are used. Each candidate runs in
its own process with two threads, all of a group interleaved in one run. Targets: DeiT-S with the default
method and the schedule deit_small/3 has at least 1.6 times the images/s of the unreduced file at batch 8 and
1.35 times at batch 1; the file of STViT-S is at least as fast as the compiled model. ``--profile`` saves, for
each file, the time in each kind of operator at batch 1 (onnxruntime's profiler, one thread).
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import timm
import torch

import visualtokens
from export_table import BASE, THREADS, Row
from own_process import OwnProcess, in_turns
from visualtokens.bench import machine
from visualtokens.export.runtime import OnnxModel

METHODS = ("weighted_merge", "merge", "weighted_kmedoids", "kmedoids", "kmeans", "power_bert", "conv")
STVIT = "stvit_small"
GROUPS = {"deit": ("unreduced", *METHODS), "stvit": ("compiled", "fused and compiled", "onnx")}
TARGETS = {("weighted_merge", 8): 1.6, ("weighted_merge", 1): 1.35, ("onnx", 8): 1.0, ("onnx", 1): 1.0}
PASSES = 20  # of a profile


def file_of(name: str, work: Path) -> Path:
    """Return the ONNX file of a candidate."""
    row = Row("", STVIT if name == "onnx" else BASE, name if name in METHODS else None, "own")
    file = work / f"{row.key.replace(' ', '-')}.onnx"
    if not file.exists():
        visualtokens.export(row.make()[0], file)
    return file


def make(name: str, work: Path, batch: int) -> Callable[[], object]:
    """Return the forward pass of one candidate; all candidates get the same images."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    images = torch.randn(batch, 3, 224, 224)
    if "compiled" not in name:
        session, values = OnnxModel(file_of(name, work), threads=THREADS), images.numpy()
        return lambda: session(values)
    model = timm.create_model(STVIT).eval()
    compiled = torch.compile(visualtokens.fuse(model) if "fused" in name else model, dynamic=False)
    return lambda: compiled(images)


def measure(names: list[str], work: Path, batch: int, rounds: int) -> dict[str, Any]:
    """Time the candidates of a group in turns; the first is the reference."""
    timings = in_turns(
        {name: OwnProcess(functools.partial(make, name, work, batch)) for name in names}, rounds=rounds
    )
    rows: dict[str, Any] = {}
    for name in names:
        ratio = timings.ratio(name)
        rows[name] = {
            "images_per_second": timings.rate(name, batch).median,
            "ratio": ratio.median,
            "interval": [ratio.low, ratio.high],
        }
        if (name, batch) in TARGETS:
            rows[name] |= {"target": TARGETS[name, batch], "met": ratio.median >= TARGETS[name, batch]}
    return {"rows": rows, "quiet": timings.quiet, "cpu": machine()["cpu"]}


def profile(file: Path) -> dict[str, Any]:
    """Return milliseconds and calls of each kind of operator in one forward pass of one image."""
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.intra_op_num_threads = True, 1
    options.profile_file_prefix = str(file.with_suffix(""))
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    images = torch.randn(1, 3, 224, 224).numpy()
    for _ in range(PASSES):
        session.run(None, {session.get_inputs()[0].name: images})
    events = json.loads(Path(session.end_profiling()).read_text())
    spent: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            spent[event["args"]["op_name"]] += event["dur"]
            calls[event["args"]["op_name"]] += 1
    return {
        name: {"ms": round(micros / 1000 / PASSES, 3), "calls": calls[name] // PASSES}
        for name, micros in spent.most_common()
    }


def save(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


def show(name: str, found: dict[str, Any]) -> None:
    print(name, "" if found["quiet"] else "(disturbed)")
    for candidate, row in found["rows"].items():
        low, high = row["interval"]
        print(
            f"  {candidate:20s} {row['images_per_second']:7.1f} images/s "
            f"{row['ratio']:.2f}× [{low:.2f}, {high:.2f}]"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the ONNX files")
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--only", choices=GROUPS, nargs="+", default=list(GROUPS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="of DeiT-S")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    result = (json.loads(options.save.read_text()) if options.save.exists() else {}) | {
        "command": "python benchmarks/bench_onnx.py --work FOLDER --save results/bench_onnx.json",
        "machine": machine(),
    }
    for group in options.only:
        names = [name for name in GROUPS[group] if name in options.methods or name not in METHODS]
        files = [name for name in names if "compiled" not in name]
        for name in files:
            file_of(name, options.work)
        if options.profile:
            result.setdefault("profiles", {})[group] = {
                name: profile(file_of(name, options.work)) for name in files
            }
            save(options.save, result)
            continue
        for batch in options.batches:
            found = measure(names, options.work, batch, options.rounds)
            result.setdefault(group, {})[str(batch)] = found
            show(f"{group}, batch {batch}", found)
            save(options.save, result)


if __name__ == "__main__":
    main()
