"""Results from records: means, paired differences over whole seeds, the best affordable arm, plot."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.studies.conftest import change
from visualtokens.studies import results
from visualtokens.studies.jobs import RECORD, arm_jobs
from visualtokens.studies.statistics import CONFIRMED, CONTRADICTED
from visualtokens.studies.study import Study, read_study

ACCURACY = {("narrow", 0): 0.5, ("wide", 0): 0.61, ("narrow", 1): 0.52, ("wide", 1): 0.64, ("narrow", 2): 0.5}
MACS = {"narrow": 100, "wide": 400}


def write_records(study: Study, out: Path, accuracy: dict[tuple[str, int], float]) -> None:
    jobs = arm_jobs(study, range(3))
    for place, value in accuracy.items():
        folder = jobs[place].folder(out)
        folder.mkdir(parents=True)
        record: dict[str, Any] = {
            "metrics": {"accuracy": value},
            "train": {"accuracy": value + 0.2},
            "score": "accuracy",
            "parameters": 10,
            "macs": MACS[place[0]],
            "core_minutes": 1.0,
            "machine": {},
        }
        (folder / RECORD).write_text(json.dumps(record))


def test_nothing_finished(tiny: Study, tmp_path: Path) -> None:
    assert results.collect(tiny, tmp_path) is None


def test_only_whole_seeds_are_compared(tiny: Study, tmp_path: Path) -> None:
    write_records(tiny, tmp_path, ACCURACY)
    found = results.collect(tiny, tmp_path, seeds=3)
    assert found is not None
    assert (found["seeds"], found["runs"], found["core_minutes"]) == ([0, 1], [5, 6], 5.0)
    (comparison,) = found["comparisons"]
    assert comparison["differences"] == pytest.approx([0.11, 0.12])
    half = 12.7062 * 0.01 / math.sqrt(2) / math.sqrt(2)  # t of one degree of freedom, sd 0.01/√2
    assert (comparison["low"], comparison["high"]) == pytest.approx((0.115 - half, 0.115 + half), abs=1e-5)
    assert comparison["verdict"] == CONFIRMED
    assert found["arms"]["wide"]["accuracy"]["mean"] == pytest.approx(0.625)
    assert found["arms"]["wide"]["train_accuracy"]["mean"] == pytest.approx(0.825)
    text = results.text(found)
    assert "+11.5 (+5.1 to +17.9): confirmed at small scale" in text
    assert "5 of 6 runs finished, 2 seeds compared, 5.0 core-minutes" in text


def test_one_seed_has_no_interval(tiny: Study, tmp_path: Path) -> None:
    write_records(tiny, tmp_path, {place: v for place, v in ACCURACY.items() if place[1] == 0})
    found = results.collect(tiny, tmp_path)
    assert found is not None
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert "+11.0 (one seed: no interval): undecided" in results.text(found)


def test_the_best_of_the_arms_that_cost_no_more(tiny_file: Path, tmp_path: Path) -> None:
    """The wide arm is too expensive for the narrow one, so it is compared with itself."""
    entries = {"table": "2", "expect": "above", "best": True, "b": ["narrow", "wide"]}
    study = read_study(
        change(
            tiny_file,
            compare=[{"claim": "x", "a": "narrow", **entries}, {"claim": "y", "a": "wide", **entries}],
        )
    )
    write_records(study, tmp_path, ACCURACY)
    found = results.collect(study, tmp_path)
    assert found is not None
    assert [each["differences"] for each in found["comparisons"]] == [[0.0, 0.0], [0.0, 0.0]]
    costs = results.draw(found).axes[2]
    assert {note.get_text() for note in costs.texts} == {"narrow", "wide"}


def test_pareto_front() -> None:
    points = {"a": (3.0, 5.0), "b": (1.0, 2.0), "c": (2.0, 1.0), "d": (3.0, 4.0), "e": (5.0, 5.0)}
    assert results.pareto_front(points) == ["b", "a"]
    assert results.pareto_front({}) == []


def test_means_over_arms_and_training_images(tiny_file: Path, tmp_path: Path) -> None:
    common = {"claim": "x", "table": "2", "expect": "below"}
    study = read_study(
        change(
            tiny_file,
            compare=[
                {**common, "a": ["narrow", "wide"], "b": "narrow"},
                {**common, "a": "wide", "b": "narrow", "metric": "train_accuracy"},
            ],
        )
    )
    write_records(study, tmp_path, ACCURACY)
    found = results.collect(study, tmp_path)
    assert found is not None
    assert found["comparisons"][0]["differences"] == pytest.approx([0.055, 0.06])
    assert found["comparisons"][1]["differences"] == pytest.approx([0.11, 0.12])
    assert {each["verdict"] for each in found["comparisons"]} == {CONTRADICTED}


def test_saved_results_are_loaded(tiny: Study, tmp_path: Path) -> None:
    write_records(tiny, tmp_path, ACCURACY)
    found = results.collect(tiny, tmp_path)
    assert found is not None
    results.save(found, tmp_path / "results")
    assert results.load_results(tmp_path / "results") == {"tiny": found}
    assert (tmp_path / "results" / "tiny.png").stat().st_size > 5_000


def test_plot_shows_every_arm_and_comparison(tiny: Study, tmp_path: Path) -> None:
    write_records(tiny, tmp_path, ACCURACY)
    left, right = results.draw(results.collect(tiny, tmp_path)).axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["narrow", "wide"]
    assert [label.get_text() for label in right.get_yticklabels()] == ["wide − narrow"]
    assert right.get_xlabel() == "difference in points, 95 % interval"
