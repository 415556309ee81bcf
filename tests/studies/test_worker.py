"""The process of a run: what it records of every task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from visualtokens.files import read_json, write_config
from visualtokens.studies.jobs import JOB, RECORD
from visualtokens.studies.worker import run_job

BACKBONE = {"backbone": "resnet18", "backbone_args": {"channels": [8, 8, 16, 16]}}
RUNS: dict[str, tuple[str, dict[str, Any], str]] = {
    "segment": ("fpn", {"head_args": {"dim": 16, "width": 16}}, "miou"),
    "detect": ("mask_rcnn", {"width": 16, "hidden": 16, "regions": 4}, "box_ap"),
}


@pytest.mark.parametrize("task", RUNS)
def test_dense_tasks_are_recorded(task: str, tmp_path: Path) -> None:
    model, model_args, score = RUNS[task]
    options = {"task": task, "model": model, "model_args": BACKBONE | model_args}
    options |= {"size": 64, "epochs": 1, "batch": 4, "data_args": {"length": 4}}
    write_config(tmp_path / JOB, {"options": options, "data": "digit_scenes", "seed": 0})
    assert run_job(tmp_path) == 0
    record = read_json(tmp_path / RECORD)
    assert record["score"] == score
    assert 0 <= record["metrics"][score] <= 1
    assert record["parameters"] > 10_000
    assert record["train"] is None
    assert (record["macs"] is None) == (task == "detect")  # whose cost depends on the image
