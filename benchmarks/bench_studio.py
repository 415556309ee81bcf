"""The studio under load: 10 clients with 30 requests each, against a lone client; and memory after bad files.

    python benchmarks/bench_studio.py --checkpoint run/ [--save results/bench_studio.json]

Starts ``vtok studio`` in a process of its own. Every client sends its next photo when it has the answer
to the one before. Each answer is compared with that of the library.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from PIL import Image

import visualtokens
from visualtokens.bench import machine
from visualtokens.data import read_image
from visualtokens.files import write_atomically

CLIENTS, EACH, LONE, BAD = 10, 30, 30, 100


@contextmanager
def studio(checkpoint: Path) -> Iterator[tuple[str, int]]:
    """Yield the address of a studio and the number of its process."""
    command = [sys.executable, "-m", "visualtokens", "studio", "--checkpoint", str(checkpoint), "--port", "0"]
    with subprocess.Popen([*command, "--no_browser"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "http://" in line)
        found = re.search(r"http://\S+", line)
        assert found is not None
        try:
            yield found.group(), process.pid
        finally:
            process.terminate()


def photos(folder: Path, count: int) -> list[Path]:
    rng, files = np.random.default_rng(0), []
    for i in range(count):
        coarse = Image.fromarray(rng.integers(256, size=(7, 7, 3), dtype=np.uint8))
        files.append(folder / f"{i}.png")
        coarse.resize((256, 256), Image.Resampling.BICUBIC).save(files[-1])
    return files


def ask(client: Client, name: str, file: Path) -> tuple[float, dict[str, Any]]:
    began = time.perf_counter()
    answer = client.predict(handle_file(str(file)), name, api_name="/predict")
    return time.perf_counter() - began, answer["classes"][0]


def load(url: str, checkpoint: Path, folder: Path) -> dict[str, Any]:
    name, library = checkpoint.resolve().name, visualtokens.load(checkpoint)
    files = photos(folder, LONE + CLIENTS * EACH)
    lone_client = Client(url, verbose=False)
    ask(lone_client, name, files[0])  # warm
    lone = [ask(lone_client, name, file)[0] for file in files[:LONE]]
    clients = [Client(url, verbose=False) for _ in range(CLIENTS)]

    def work(i: int) -> list[tuple[Path, float, dict[str, Any]]]:
        own = files[LONE + i * EACH : LONE + (i + 1) * EACH]
        return [(file, *ask(clients[i], name, file)) for file in own]

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = [answer for part in pool.map(work, range(CLIENTS)) for answer in part]
    wrong = 0
    for file, _, found in answers:
        label, probability = library.predict(read_image(file)).top[0]
        wrong += found["class"] != label or abs(found["probability"] - probability) > 1e-5
    seconds = [each for _, each, _ in answers]
    return {
        "requests": CLIENTS * EACH,
        "answers": len(answers),
        "wrong": wrong,
        "lone_ms": {p: round(1000 * float(np.percentile(lone, p)), 1) for p in (50, 95)},
        "together_ms": {p: round(1000 * float(np.percentile(seconds, p)), 1) for p in (50, 95)},
        "p95_ratio": round(float(np.percentile(seconds, 95) / np.percentile(lone, 95)), 2),
    }


def memory_after_bad_files(url: str, process: int, name: str, folder: Path) -> dict[str, Any]:
    client = Client(url, verbose=False)
    bad = folder / "bad.jpg"
    Image.new("1", (12_000, 9_000)).save(folder / "bomb.png")
    contents = [b"", b"no photo", photos(folder, 1)[0].read_bytes()[:500], (folder / "bomb.png").read_bytes()]
    before, refused = resident(process), 0
    for i in range(BAD):
        bad.write_bytes(contents[i % len(contents)])
        try:
            ask(client, name, bad)
        except AppError:
            refused += 1
    return {"bad_files": BAD, "refused": refused, "grown_mb": round((resident(process) - before) / 2**20, 1)}


def resident(process: int) -> int:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of a classifier")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, studio(options.checkpoint) as (url, process):
        folder, name = Path(temporary), options.checkpoint.resolve().name
        result = {"command": "python benchmarks/bench_studio.py --checkpoint RUN", "machine": machine()}
        result |= {"model": visualtokens.load(options.checkpoint).config.get("architecture")}
        result |= load(url, options.checkpoint, folder)
        result |= memory_after_bad_files(url, process, name, folder)
    text = json.dumps(result, indent=1) + "\n"
    print(text)
    if options.save:
        write_atomically(options.save, lambda path: path.write_text(text, encoding="utf-8"))


if __name__ == "__main__":
    main()
