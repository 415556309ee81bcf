"""Data shared by the tests of several tasks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from visualtokens.data import open_dataset


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The spec of 64 training and 20 validation digits."""
    path: Path = tmp_path_factory.mktemp("digits") / "few.npz"
    arrays = {}
    for split, count in (("train", 64), ("val", 20)):
        source = open_dataset("digits", split)  # type: ignore[arg-type]
        arrays[f"x_{split}"] = np.stack([np.asarray(source[i][0]) for i in range(count)])
        arrays[f"y_{split}"] = np.array([source[i][1] for i in range(count)])
    np.savez(path, **arrays)
    return f"npz:{path}"
