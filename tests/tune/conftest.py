"""Short measurements and short ladders for all tests of tuning."""

from __future__ import annotations

from functools import partial

import pytest

from visualtokens.bench import interleave
from visualtokens.tune import planning


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call per turn without repetitions, and every fifth rung: the tests do not depend on timings."""
    monkeypatch.setattr(planning, "interleave", partial(interleave, min_seconds=0.0, retries=0))
    monkeypatch.setattr(planning, "STEPS", planning.STEPS // 5)
