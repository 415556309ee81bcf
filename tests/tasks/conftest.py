"""Data shared by the tests of several tasks."""

from __future__ import annotations

import pytest

from tests.digits import save_digits


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The spec of 64 training and 20 validation digits."""
    return save_digits(tmp_path_factory.mktemp("digits") / "few.npz", train=64, val=20)
