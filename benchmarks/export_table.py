"""Every model and every reduction method in every exported format: difference, file size and images/s.

    python benchmarks/export_table.py prepare --work FOLDER [--only 'stvit_*'] [--parts onnx pt2]
    python benchmarks/export_table.py speed --work FOLDER [--only 'stvit_*'] [--seconds 200]
    python benchmarks/export_table.py page --work FOLDER

A row is one model at its own size, with a dynamic batch, or at another, non-square size, with dynamic batch
and size. ``prepare`` writes the files of a row, compares them with the model, and fills the cache of
``torch.compile``; it may run beside other work, and ``--parts onnx pt2`` leaves out what takes minutes to
compile. ``speed`` needs a quiet machine: the model, the compiled model and the files take turns in one
interleaved run. Each row has processes of its own. A row that takes longer than ``--limit`` is refused, no
row is started after ``--seconds``, and both steps continue where they stopped. ``page`` collects the rows in
results/export.json and docs/export_table.md. Rows with a speed in results/export.json are not measured again,
so the work may be spread over several days and machines of one kind, and the files of measured rows may be
deleted.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import visualtokens
from export_page import page
from own_process import settled_canary
from visualtokens.bench import interleave, machine
from visualtokens.cli.models import read_sizes
from visualtokens.errors import UserError
from visualtokens.export import FORMATS
from visualtokens.export.program import Captured, capture_model, example_size
from visualtokens.export.runtime import OnnxModel
from visualtokens.files import write_atomically
from visualtokens.reduce import METHODS
from visualtokens.tasks.timm_models import preprocess_for

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "export.json"
BASE, KEEP = "deit_small_patch16_224", "deit_small/3"
SIZES = ("own", "other")
PARTS = (*FORMATS, "compiled")
THREADS = 2
ROUNDS, TURN = 5, 0.1  # seconds
Measured = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One model at one of its sizes."""

    family: str
    model: str
    method: str | None  # of reduction
    size: str  # one of SIZES

    @property
    def key(self) -> str:
        return " ".join(filter(None, (self.model, self.method, self.size)))

    def folder(self, work: Path) -> Path:
        return work / self.key.replace(" ", "-")

    def make(self) -> tuple[nn.Module, Tensor]:
        """Return the model in eval mode and one image."""
        torch.manual_seed(0)
        model = timm.create_model(self.model).eval()
        if self.method is not None:
            visualtokens.reduce(model, self.method, keep=KEEP)
        own = preprocess_for(model).size
        height, width = own if self.size == "own" else example_size(own, 32)
        return model, torch.randn(1, 3, height, width)


def all_rows() -> list[Row]:
    """Return the rows in the order of the page."""
    sizes = read_sizes()
    subjects = [(sizes[name].family, name, None) for name in visualtokens.list_models()]
    subjects.sort(key=lambda subject: subject[0])
    subjects += [("DeiT-S with fewer tokens", BASE, method) for method in (None, *METHODS)]
    return [Row(*subject, size) for subject in subjects for size in SIZES]


def by_turns(rows: list[Row]) -> Iterator[Row]:
    """Yield the rows so that every family has its first model before any has its second; own sizes first."""
    families: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: SIZES.index(row.size)):
        families.setdefault(row.family, []).append(row)
    for i in range(max(map(len, families.values()))):
        yield from (members[i] for members in families.values() if i < len(members))


# In the process of a row.


def prepare(row: Row, folder: Path, parts: Sequence[str]) -> None:
    """Write the files of a row and compare them with the model; "compiled" fills the cache."""
    torch.set_num_threads(1)
    model, image = row.make()

    @functools.cache
    def captured() -> Captured | UserError:
        try:
            return capture_model(model, dynamic=("batch",) if row.size == "own" else ("batch", "size"))
        except UserError as error:
            return error

    def write(part: str) -> Measured:
        program = captured()
        try:
            if isinstance(program, UserError):
                raise program
            made = program.write(folder / f"{part}{FORMATS[part]}", part)
        except UserError as error:
            return {"refused": str(error)}
        return {"difference": made.difference, "bytes": made.bytes}

    for part in parts:
        if part == "compiled":
            with torch.no_grad():
                compiled(model, row)(image)
        found = {} if part == "compiled" else write(part)
        save(folder / f"{part}.json", {"pixels": list(image.shape[2:])} | found)


def speed(row: Row, folder: Path, parts: Sequence[str]) -> None:
    """Time the model, the compiled model and the files of a row in turns."""
    torch.set_num_threads(THREADS)
    model, image = row.make()
    candidates = {part: opened(part, folder, row, model, image) for part in ("eager", *parts)}
    with torch.no_grad():
        timings = interleave(candidates, rounds=ROUNDS, min_seconds=TURN, canary=settled_canary())
    rates = {name: timings.rate(name).median for name in candidates}
    save(folder / "speed.json", {"images_per_second": rates, "quiet": timings.quiet})


def compiled(model: nn.Module, row: Row) -> Callable[[Tensor], object]:
    return torch.compile(model, dynamic=row.size != "own")


def opened(part: str, folder: Path, row: Row, model: nn.Module, image: Tensor) -> Callable[[], object]:
    """Return a function that runs a candidate."""
    if part == "onnx":
        session, values = OnnxModel(folder / "onnx.onnx", threads=THREADS), image.numpy()
        return lambda: session(values)
    program: Any = {
        "eager": lambda: model,
        "compiled": lambda: compiled(model, row),
        "pt2": lambda: torch.export.load(folder / "pt2.pt2").module(),
        "aoti": lambda: torch._inductor.aoti_load_package(str(folder / "aoti.pt2")),  # type: ignore[attr-defined]
    }[part]()
    return lambda: program(image)


def run(step: Callable[[Row, Path, Sequence[str]], None], row: Row, folder: Path, parts: list[str]) -> None:
    """Take one step of a row."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # a process per core prepares rows
    inductor.cpp.threads = THREADS  # also while this process has one thread
    began = time.perf_counter()
    step(row, folder, parts)
    print(f"{row.key}: {' '.join(parts)} {time.perf_counter() - began:.0f} s", flush=True)


# In the main process.


def take(step: str, rows: list[Row], options: argparse.Namespace) -> None:
    """Take one step of all rows that lack it, each in a process of its own."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(options.work / "cache")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["timm", "visualtokens.export.program", "onnxruntime"])
    began, known = time.perf_counter(), saved_rows()

    def start(row: Row) -> None:
        folder = row.folder(options.work)
        if "images_per_second" in known.get(row, {}):
            return
        parts = to_prepare(folder, options.parts) if step == "prepare" else to_time(folder)
        if not parts or time.perf_counter() - began > options.seconds:
            return
        folder.mkdir(parents=True, exist_ok=True)
        process = context.Process(
            target=run, args=(prepare if step == "prepare" else speed, row, folder, parts)
        )
        process.start()
        process.join(options.limit)
        if process.is_alive():
            process.kill()
            process.join()
            late = {"refused": f"not finished after {options.limit / 60:.0f} minutes"}
            for part in to_prepare(folder, parts):
                save(folder / f"{part}.json", late)
        if process.exitcode:
            print(f"{row.key}: {' '.join(parts)} failed with exit code {process.exitcode}", flush=True)

    with ThreadPoolExecutor(options.processes if step == "prepare" else 1) as pool:
        list(pool.map(start, by_turns(rows)))


def to_prepare(folder: Path, parts: Sequence[str]) -> list[str]:
    """Return the parts of a row that are not there yet."""
    return [part for part in parts if not (folder / f"{part}.json").exists()]


def to_time(folder: Path) -> list[str]:
    """Return the parts of a row that can be timed; none if some are missing, or if it has been timed."""
    if to_prepare(folder, PARTS) or (folder / "speed.json").exists():
        return []
    return [part for part in PARTS if "refused" not in read(folder / f"{part}.json")]


def saved_rows() -> dict[Row, Measured]:
    """Return the rows of earlier runs."""
    return {
        Row(*(row[name] for name in ("family", "model", "method", "size"))): row
        for row in read(RESULTS).get("rows", [])
    }


def collect(work: Path) -> Measured:
    """Return all rows with what is known of them."""
    rows, known = [], saved_rows()
    for row in all_rows():
        folder, before = row.folder(work), known.get(row, {})
        if "images_per_second" in before:
            rows.append(before)
            continue
        files = {format: folder / f"{format}.json" for format in FORMATS}
        found = {format: read(file) for format, file in files.items() if file.exists()}
        rows.append(
            {"family": row.family, "model": row.model, "method": row.method, "size": row.size}
            | {"formats": before.get("formats", {}) | found}
            | read(folder / "speed.json")
        )
    command = "python benchmarks/export_table.py {prepare,speed,page} --work FOLDER"
    return {"machine": machine(), "command": command, "threads": THREADS, "batch": 1, "rows": rows}


def read(file: Path) -> Measured:
    return json.loads(file.read_text()) if file.exists() else {}


def save(file: Path, document: Measured) -> None:
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    write_atomically(file, lambda path: path.write_text(text, encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("step", choices=("prepare", "speed", "page"))
    parser.add_argument("--work", type=Path, required=True, help="folder of the files, some 30 GB")
    parser.add_argument("--only", default="*", help="pattern of rows, such as 'stvit_small own'")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="that are prepared")
    parser.add_argument("--processes", type=int, default=2, help="that prepare rows, of one thread each")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a row, which is then refused")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no row is started")
    options = parser.parse_args()
    if options.step == "page":
        found = collect(options.work)
        save(RESULTS, found)
        (ROOT / "docs" / "export_table.md").write_text(page(found), encoding="utf-8")
    else:
        take(options.step, [row for row in all_rows() if fnmatch.fnmatch(row.key, options.only)], options)


if __name__ == "__main__":
    main()
