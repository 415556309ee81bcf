"""Every model and every reduction method in every exported format: difference, file size and images/s.

    python benchmarks/export_table.py [--only 'stvit_*'] [--formats onnx pt2 aoti] [--no-speed] [--batch 8]

A row is one model at its own size, with a dynamic batch, or at another, non-square size, with dynamic batch
and size. Its files are written and compared with the model by ``visualtokens.export``; then the model, the
compiled model and the files take turns in one interleaved run, which needs a quiet machine. A refused export
keeps its reason. Rows are saved one by one in results/export.json, and the same command continues;
docs/export_table.md is written at the end from all rows.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import visualtokens
from visualtokens.bench import interleave, machine
from visualtokens.errors import UserError
from visualtokens.export.program import example_size
from visualtokens.export.runtime import OnnxModel
from visualtokens.files import write_atomically
from visualtokens.reduce import METHODS
from visualtokens.tasks.timm_models import preprocess_for

ROOT = Path(__file__).resolve().parents[1]
RESULTS, TABLE = ROOT / "results" / "export.json", ROOT / "docs" / "export_table.md"
FORMATS = ("onnx", "pt2", "aoti")
BASE, KEEP = "deit_small_patch16_224", "deit_small/3"
SIZES = ("own", "other")
ROUNDS = 7


def subjects() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """The name and the constructor of every row's model."""
    for name in visualtokens.list_models():
        yield name, lambda name=name: timm.create_model(name)  # type: ignore[misc]
    yield BASE, lambda: timm.create_model(BASE)
    for method in METHODS:
        yield (
            f"{BASE} {method}",
            lambda method=method: visualtokens.reduce(timm.create_model(BASE), method, keep=KEEP),  # type: ignore[misc]
        )


def measure(make: Callable[[], nn.Module], size: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Export a model in all formats and compare the speed of those that are not refused."""
    torch.manual_seed(0)
    model = make().eval()
    own = preprocess_for(model).size
    height, width = own if size == "own" else example_size(own, 32)
    images = torch.randn(arguments.batch, 3, height, width)
    dynamic = ("batch",) if size == "own" else ("batch", "size")
    row: dict[str, Any] = {"size": [height, width], "formats": {}}
    candidates: dict[str, Callable[[], object]] = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for format in arguments.formats:
            path = Path(folder, f"{format}{'.onnx' if format == 'onnx' else '.pt2'}")
            try:
                made = visualtokens.export(model, path, format=format, dynamic=dynamic)
            except UserError as error:
                row["formats"][format] = {"refused": str(error)}
                continue
            row["formats"][format] = {
                "difference": made.difference,
                "bytes": made.bytes,
                "multiple": made.metadata.multiple,
            }
            if arguments.speed:
                candidates[format] = _runner(path, format, images)
        if arguments.speed:
            compiled = torch.compile(model, dynamic=size != "own")
            candidates = {"eager": lambda: model(images), "compiled": lambda: compiled(images)} | candidates
            timings = interleave(candidates, rounds=ROUNDS)
            row["images_per_second"] = {
                name: asdict(timings.rate(name, arguments.batch)) for name in candidates
            }
            row["quiet"] = timings.quiet
    return row


def _runner(path: Path, format: str, images: Tensor) -> Callable[[], object]:
    if format == "onnx":
        session, values = OnnxModel(path, threads=torch.get_num_threads()), images.numpy()
        return lambda: session(values)
    if format == "pt2":
        program = torch.export.load(path).module()
        return lambda: program(images)
    package = torch._inductor.aoti_load_package(str(path))
    return lambda: package(images)


def table(rows: dict[str, Any]) -> str:
    """The page of the documentation."""
    lines = [
        "# Exported models",
        "",
        "Every registered model and every reduction method (on DeiT-S with the schedule `deit_small/3`) in "
        "every format, written by `python benchmarks/export_table.py`. The difference is the largest between "
        "the answers of the file and of the model, in float32. The second row of a model has dynamic height "
        "and width. Images/s are medians of one interleaved run; — was not measured.",
        "",
        "| model | size | format | difference | MB | images/s | eager | compiled |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, row in rows.items():
        name, _, _ = key.rpartition(" @ ")
        shown = "×".join(map(str, row["size"]))
        speeds = row.get("images_per_second", {})

        def speed(kind: str, speeds: dict[str, Any] = speeds) -> str:
            return f"{speeds[kind]['median']:.3g}" if kind in speeds else "—"

        for format, cell in row["formats"].items():
            if "refused" in cell:
                reason = " ".join(cell["refused"].split()).replace("|", "\\|")
                lines.append(f"| {name} | {shown} | {format} | refused: {reason} | | | | |")
                continue
            lines.append(
                f"| {name} | {shown} | {format} | {cell['difference']:.1e} | {cell['bytes'] / 1e6:.1f} | "
                f"{speed(format)} | {speed('eager')} | {speed('compiled')} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="*", help="pattern of names")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--no-speed", dest="speed", action="store_false", help="do not measure images/s")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--save", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path, default=TABLE)
    arguments = parser.parse_args()
    saved: dict[str, Any] = (
        json.loads(arguments.save.read_text()) if arguments.save.exists() else {"rows": {}}
    )
    saved |= {"machine": machine(), "command": "python benchmarks/export_table.py", "batch": arguments.batch}
    for name, make in subjects():
        for size in SIZES:
            key = f"{name} @ {size}"
            if not fnmatch.fnmatch(name, arguments.only) or _is_done(saved["rows"].get(key), arguments):
                continue
            saved["rows"][key] = measure(make, size, arguments)
            arguments.save.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(saved, indent=1) + "\n"
            write_atomically(arguments.save, lambda path, text=text: path.write_text(text))
            print(key, json.dumps(saved["rows"][key]["formats"])[:400], flush=True)
    page = table(saved["rows"])
    write_atomically(arguments.table, lambda path: path.write_text(page, encoding="utf-8"))


def _is_done(row: dict[str, Any] | None, arguments: argparse.Namespace) -> bool:
    """Whether a row has all formats, and the speeds if these are wanted."""
    if row is None or not set(arguments.formats) <= set(row["formats"]):
        return False
    return "images_per_second" in row or not arguments.speed


if __name__ == "__main__":
    main()
