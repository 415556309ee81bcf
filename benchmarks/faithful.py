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
from torch import Tensor, nn
from tqdm import tqdm

from visualtokens.explain import Faithfulness, FaithfulnessEvaluator, Score, Setting, gather
from visualtokens.explain.faithfulness import HEADER, randomisation_check
from visualtokens.files import write_atomically
from visualtokens.tables import table

OURS = "pixels"
Item = tuple[Tensor, NDArray[np.int8] | None]  # the normalised photo, and its foreground
Row = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What a process needs to evaluate a photo."""

    evaluator: FaithfulnessEvaluator
    read: Callable[[Path], Item]

    def row(self, photo: Path, methods: Sequence[str]) -> Row:
        """The scores of some methods on a photo, JSON-ready."""
        scores = self.evaluator.evaluate(*self.read(photo), methods=methods)
        return {"photo": photo.name, "scores": {name: score.to_dict() for name, score in scores.items()}}


def evaluate(
    make: Callable[[], Work],
    photos: Sequence[Path],
    file: Path,
    *,
    methods: Sequence[str],
    workers: int | None = None,
) -> list[Row]:
    """The scores of each photo, in processes of one thread that each call ``make``.

    They are lines of JSON in ``file``, a line for a photo and some methods, and are not computed again.
    """
    known = read_rows(file)
    left = {photo: [m for m in methods if m not in known.get(photo.name, {})] for photo in photos}
    left = {photo: missing for photo, missing in left.items() if missing}
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(workers or os.cpu_count(), context, initializer=_start, initargs=(make,)) as pool,
        file.open("a") as out,
    ):
        futures = [pool.submit(_row, photo, missing) for photo, missing in left.items()]
        for future in tqdm(as_completed(futures), desc="evaluate", total=len(left), mininterval=30):
            row = future.result()
            known.setdefault(row["photo"], {}).update(row["scores"])
            print(json.dumps(row), file=out, flush=True)
    return [{"photo": photo.name, "scores": {m: known[photo.name][m] for m in methods}} for photo in photos]


def read_rows(file: Path) -> dict[str, Row]:
    """The scores so far, by photo and method."""
    known: dict[str, Row] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        row = json.loads(line)
        known.setdefault(row["photo"], {}).update(row["scores"])
    return known


_work: Work


def _start(make: Callable[[], Work]) -> None:
    global _work
    torch.set_num_threads(1)
    _work = make()


def _row(photo: Path, methods: Sequence[str]) -> Row:
    return _work.row(photo, methods)


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


def after_randomisation(
    model: nn.Module, setting: Setting, images: Sequence[Tensor], methods: Sequence[str]
) -> dict[str, Any]:
    """The rank correlation of the maps before and after the weights are randomised, by method."""
    found = randomisation_check(model, setting, images, methods=methods)
    means = {name: {"mean": mean.value, "interval": list(mean.interval)} for name, mean in found.items()}
    return {"photos": len(images), **means}


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
