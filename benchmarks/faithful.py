"""What the benchmarks of faithfulness share: resumable evaluation, tables with intervals, figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from visualtokens.explain import Faithfulness, FaithfulnessEvaluator, Score, gather
from visualtokens.explain.faithfulness import HEADER
from visualtokens.files import write_atomically
from visualtokens.tables import table

OURS = "path"
Item = tuple[Tensor, NDArray[np.int8] | None]  # the normalised photo, and its foreground


def evaluate(
    evaluator: FaithfulnessEvaluator, photos: Sequence[Path], read: Callable[[Path], Item], file: Path
) -> Iterator[dict[str, Any]]:
    """The scores of each photo; earlier ones are read from ``file``, one line of JSON each."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {row["photo"]: row for row in rows}
    for path in tqdm(photos, desc="evaluate", mininterval=30):
        if path.name not in known:
            scores = {name: score.to_dict() for name, score in evaluator.evaluate(*read(path)).items()}
            known[path.name] = {"photo": path.name, "scores": scores}
            with file.open("a") as out:
                out.write(json.dumps(known[path.name]) + "\n")
        yield known[path.name]


def collect(rows: Sequence[dict[str, Any]]) -> Faithfulness:
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
