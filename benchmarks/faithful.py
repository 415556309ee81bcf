"""What the benchmarks of faithfulness share: resumable evaluation, tables with intervals, figures."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from visualtokens.explain import Faithfulness, FaithfulnessEvaluator, Score, gather
from visualtokens.explain.faithfulness import HEADER
from visualtokens.files import write_atomically
from visualtokens.tables import table

OURS = "path"
Item = tuple[Tensor, NDArray[np.int8] | None]  # the normalised photo, and its foreground
Row = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What a process needs to evaluate a photo."""

    evaluator: FaithfulnessEvaluator
    read: Callable[[Path], Item]

    def row(self, photo: Path) -> Row:
        """The scores of a photo, JSON-ready."""
        scores = self.evaluator.evaluate(*self.read(photo))
        return {"photo": photo.name, "scores": {name: score.to_dict() for name, score in scores.items()}}


def evaluate(make: Callable[[], Work], photos: Sequence[Path], file: Path) -> list[Row]:
    """The scores of each photo, in processes of one thread that each call ``make``.

    Finished photos are lines of JSON in ``file`` and are not evaluated again.
    """
    known = {row["photo"]: row for row in read_rows(file)}
    left = [photo for photo in photos if photo.name not in known]
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(os.cpu_count(), context, initializer=_start, initargs=(make,)) as pool,
        file.open("a") as out,
    ):
        futures = [pool.submit(_row, photo) for photo in left]
        for future in tqdm(as_completed(futures), desc="evaluate", total=len(left), mininterval=30):
            row = known[future.result()["photo"]] = future.result()
            print(json.dumps(row), file=out, flush=True)
    return [known[photo.name] for photo in photos]


def read_rows(file: Path) -> list[Row]:
    """The photos evaluated so far."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


_work: Work


def _start(make: Callable[[], Work]) -> None:
    global _work
    torch.set_num_threads(1)
    _work = make()


def _row(photo: Path) -> Row:
    return _work.row(photo)


def collect(rows: Sequence[Row]) -> Faithfulness:
    """The faithfulness of all methods from the rows of :func:`evaluate`."""
    return gather({name: Score.from_dict(s) for name, s in row["scores"].items()} for row in rows)


def summary(found: Faithfulness) -> dict[str, Any]:
    """The means with intervals, the curves, and the paired differences of our method from the others."""
    methods = found.to_dict()
    for name, means in methods.items():
        for which in ("deletion", "insertion"):
            means[f"{which}_curve"] = [round(value, 4) for value in means[f"{which}_curve"]]
        if name != OURS:
            means["ours_minus_this"] = {
                metric: {"mean": mean.value, "interval": list(mean.interval)}
                for metric, mean in found.differences(OURS, name).items()
                if mean.images
            }
    return {"photos": found.images, "methods": methods}


def show(found: Faithfulness) -> str:
    """Tables of the means and of the paired differences with their 95 % intervals."""
    means = table(found.rows(), header=HEADER, right=(1, 2, 3, 4, 5))
    rows = []
    for name in found.scores:
        if name != OURS:
            differences = found.differences(OURS, name)
            cells = (differences[metric] for metric in ("deletion", "insertion", "saco"))
            rows.append((name, *("{:+.3f} ({:+.3f} to {:+.3f})".format(m.value, *m.interval) for m in cells)))
    header = (f"{OURS} minus", "deletion", "insertion", "SaCo")
    return f"{means}\n\n{table(rows, header=header, right=(1, 2, 3))}"


def save(result: dict[str, Any], found: Faithfulness, path: Path) -> None:
    """Write the JSON file, and the curves next to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    figure = found.plot()
    write_atomically(path.with_suffix(".png"), lambda file: figure.savefig(file, dpi=130, format="png"))
