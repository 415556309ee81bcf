"""Every model and every reduction method in every exported format: difference, file size and images/s.

    python benchmarks/export_table.py [--quick] [--only 'stvit_*' …] [--seconds 3000]

A row is one model at its own size, with a dynamic batch, or at another, non-square size, with dynamic batch
and size. Each row has a process of its own, which writes the three files, compares them with the model and
compiles the model; two rows at a time. When several rows are ready, they are timed one after the other: the
model, the compiled model and the files take turns in one interleaved run, while nothing else runs. So the
machine must be quiet throughout.

results/export.json and docs/export_table.md are written after every few rows, and finished rows are not
measured again, so the script can be stopped and started again. Compiling takes 2 to 10 minutes for each row;
``--quick`` leaves it out, and a later run without it measures these rows again. ``--page`` writes the page
only.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import visualtokens
import vtok
from export_page import page
from own_process import settled_canary
from visualtokens.bench import interleave, machine
from visualtokens.cli.models import read_sizes
from visualtokens.errors import UserError
from visualtokens.export import FORMATS
from visualtokens.export.program import capture_model, example_size
from visualtokens.export.runtime import OnnxModel
from visualtokens.files import write_atomically
from visualtokens.reduce import METHODS
from visualtokens.tasks.timm_models import preprocess_for

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "results" / "export.json", ROOT / "docs" / "export_table.md"
BASE, KEEP = "deit_small_patch16_224", "deit_small/3"
SIZES = ("own", "other")
THREADS = 2
TOGETHER = 8  # rows that are prepared before they are timed
ROUNDS, TURN, RETRIES = 6, 0.1, 0  # turns are of 0.1 seconds
CAPTURE_SECONDS, COMPILE_SECONDS = 300, 600  # what takes longer is refused
PADDED = ("PaCa-ViT", "STViT")  # families whose packages should not take any size
SPEED = "images_per_second"
COMPILED = ("aoti", "compiled")  # what takes minutes for each row
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
    for i in range(max(map(len, families.values()), default=0)):
        yield from (members[i] for members in families.values() if i < len(members))


# In the process of a row.


def serve(row: Row, folder: Path, connection: Connection, quick: bool) -> None:
    """Send what is found about each file of a row, and its speeds when asked for them."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # two rows are prepared at once
    torch.set_num_threads(THREADS)
    model, image = row.make()
    written = []
    for format, found in write_files(row, model, folder, written_formats(quick)):
        connection.send((format, {"pixels": list(image.shape[2:])} | found))
        written += [] if "refused" in found else [format]
    if not written:
        return
    with torch.no_grad():
        names = [name for name in ("eager", "compiled", *written) if not (quick and name in COMPILED)]
        candidates = {name: opened(name, folder, model, image) for name in names}
        for candidate in candidates.values():
            candidate()
        connection.send(None)  # ready
        connection.recv()
        timings = interleave(
            candidates, rounds=ROUNDS, min_seconds=TURN, retries=RETRIES, canary=settled_canary()
        )
    rates = {name: timings.rate(name).median for name in candidates}
    connection.send({SPEED: rates, "quiet": timings.quiet, "machine": machine()["cpu"]})


def written_formats(quick: bool) -> list[str]:
    return [format for format in FORMATS if not (quick and format in COMPILED)]


def write_files(
    row: Row, model: nn.Module, folder: Path, formats: list[str]
) -> Iterator[tuple[str, Measured]]:
    """Yield each format with the largest difference from the model and the size, or why it is refused."""
    try:
        varying: dict[str, Any] = {"dynamic": ("batch",)}
        if row.size == "other":
            varying = {"dynamic": ("batch", "size"), "any_size": row.family not in PADDED}
        captured = capture_model(model, **varying, seconds=CAPTURE_SECONDS)
    except UserError as error:
        yield from ((format, {"refused": str(error)}) for format in FORMATS)
        return
    for format in formats:
        try:
            made = captured.write(file_of(format, folder), format, seconds=COMPILE_SECONDS)
        except UserError as error:
            yield format, {"refused": str(error)}
        else:
            yield format, {"difference": made.difference, "bytes": made.bytes}


def file_of(format: str, folder: Path) -> Path:
    return folder / f"{format}{FORMATS[format]}"


def opened(name: str, folder: Path, model: nn.Module, image: Tensor) -> Callable[[], object]:
    """Return a function that runs a candidate."""
    if name == "onnx":
        session, values = OnnxModel(file_of(name, folder), threads=THREADS), image.numpy()
        return lambda: session(values)
    program: Any = {
        "eager": lambda: model,
        "compiled": lambda: torch.compile(model, dynamic=False),
        "pt2": lambda: torch.export.load(file_of(name, folder)).module(),
        "aoti": lambda: torch._inductor.aoti_load_package(str(file_of(name, folder))),  # type: ignore[attr-defined]
    }[name]()
    return lambda: program(image)


# In the main process.


class RowProcess:
    """The process of a row: first it prepares the row, then it waits until it may measure its speed."""

    def __init__(self, row: Row, work: Path) -> None:
        self.row = row
        self.formats: dict[str, Measured] = {}
        self.speed: Measured = {}
        self._folder = work / row.key.replace(" ", "-")
        self._process: BaseProcess | None = None
        self._connection: Connection

    def prepare(self, *, quick: bool, limit: float) -> None:
        """Start the process and wait until it can measure; what takes longer than ``limit`` is refused."""
        began = time.perf_counter()
        context = multiprocessing.get_context("forkserver")
        self._folder.mkdir()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(self.row, self._folder, theirs, quick), daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            while self._connection.poll(max(0, limit - (time.perf_counter() - began))):
                message = self._connection.recv()
                if message is None:
                    break
                self.formats[message[0]] = message[1]
            else:
                self._process.kill()
                late = {"refused": f"not finished after {limit / 60:.0f} minutes"}
                self.formats = dict.fromkeys(written_formats(quick), late) | self.formats
        except EOFError:
            self._process.join()
            if self._process.exitcode:
                print(f"{self.row.key} failed with exit code {self._process.exitcode}", flush=True)
        print(f"{self.row.key}: {time.perf_counter() - began:.0f} s", flush=True)

    def measure(self) -> None:
        """Let the process measure its speeds, if it is ready."""
        assert self._process is not None
        if self._process.is_alive():
            try:
                self._connection.send("measure")
                self.speed = self._connection.recv()
            except EOFError:
                print(f"{self.row.key} could not be timed", flush=True)
        self._process.join()
        shutil.rmtree(self._folder)


def measure(rows: list[Row], *, quick: bool, processes: int, limit: float, seconds: float) -> None:
    """Measure the rows that have no result yet, and save the results after every few of them."""
    began = time.perf_counter()
    known = saved_rows()
    waiting = (row for row in by_turns(rows) if not is_finished(known.get(row, {}), quick=quick))
    with tempfile.TemporaryDirectory() as work:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{work}/cache"
        vtok.configure_threads(os.environ)  # as the command does: idle threads must not disturb other rows
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["timm", "visualtokens.export.program", "onnxruntime"])
        while time.perf_counter() - began < seconds:
            together = [RowProcess(row, Path(work)) for row in itertools.islice(waiting, TOGETHER)]
            if not together:
                return
            with ThreadPoolExecutor(processes) as pool:
                list(pool.map(partial(RowProcess.prepare, quick=quick, limit=limit), together))
            print(f"timing {len(together)} rows", flush=True)
            for each in together:
                each.measure()
                save(each)
            print("saved", flush=True)


def is_finished(result: Measured, *, quick: bool) -> bool:
    """Whether a row has its speeds, or no file that could be timed."""
    formats = result.get("formats", {})
    refused = len(formats) == len(FORMATS) and all("refused" in found for found in formats.values())
    return refused or ("eager" if quick else "compiled") in result.get(SPEED, {})


def saved_rows() -> dict[Row, Measured]:
    """Return the results so far."""
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    return {Row(*(row[each.name] for each in fields(Row))): row for row in rows}


def save(measured: RowProcess | None = None) -> None:
    """Add a row to results/export.json, and write the page."""
    results = saved_rows()
    if measured is not None:
        row, earlier = measured.row, results.get(measured.row, {})
        formats = earlier.get("formats", {}) | measured.formats
        results[row] = earlier | asdict(row) | {"formats": formats} | measured.speed
    document = {
        "machine": machine(),
        "command": "python benchmarks/export_table.py",
        "threads": THREADS,
        "batch": 1,
        "rows": [results[row] for row in all_rows() if row in results],
    }
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    write_atomically(RESULTS, lambda path: path.write_text(text, encoding="utf-8"))
    PAGE.write_text(page(document), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=["*"], help="patterns of rows, such as 'stvit_small own'"
    )
    parser.add_argument("--quick", action="store_true", help="leave out what is compiled")
    parser.add_argument("--processes", type=int, default=2, help="that prepare rows")
    parser.add_argument("--limit", type=float, default=900, help="seconds for the files of a row")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no row is started")
    parser.add_argument("--page", action="store_true", help="write the page only")
    options = parser.parse_args()
    if options.page:
        save()
        return
    rows = [row for row in all_rows() if any(fnmatch.fnmatch(row.key, only) for only in options.only)]
    measure(
        rows,
        quick=options.quick,
        processes=options.processes,
        limit=options.limit,
        seconds=options.seconds,
    )


if __name__ == "__main__":
    main()
