"""The CI workflow has a job for every kernel combination and supported Python version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cpu_matrix import COMBINATIONS

WORKFLOW = Path(__file__).parents[1] / ".github" / "workflows" / "test.yml"


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    return yaml.safe_load(WORKFLOW.read_text())["jobs"]


def test_every_kernel_combination_is_a_job(jobs: dict[str, Any]) -> None:
    assert jobs["cpus"]["strategy"]["matrix"]["cpu"] == list(COMBINATIONS)


def test_every_supported_python_is_a_job(jobs: dict[str, Any]) -> None:
    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
