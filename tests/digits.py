"""Real data small enough for a test."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from visualtokens.data import open_dataset


def save_digits(path: Path, *, train: int, val: int) -> str:
    """Write the first digits of each split to an npz file; returns its dataset name for ``open_dataset``."""
    arrays = {}
    for split, count in (("train", train), ("val", val)):
        digits = open_dataset("digits", split)  # type: ignore[arg-type]
        arrays[f"x_{split}"] = np.stack([np.asarray(digits[i][0]) for i in range(count)])
        arrays[f"y_{split}"] = np.array([digits[i][1] for i in range(count)])
    np.savez(path, **arrays)
    return f"npz:{path}"
