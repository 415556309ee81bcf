"""A tiny study: two arms and two seeds on 64 digits."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.digits import save_digits
from visualtokens.studies.study import Study, read_study

TINY = """
claim: A wider model is more accurate.
source: {paper: paca-vit, tables: ["2"], section: "4"}
data: cifar
recipe:
  model: paca_vit_nano
  model_args: {channels: [8, 16, 24, 32], clusters: [4, 4, 0, 0]}
  epochs: 3
  size: 16
  batch: 16
  augment: digits
  ema: 0.9
arms:
  narrow: {}
  wide: {model_args: {channels: [16, 32, 48, 64]}}
seeds: 2
compare:
  - {claim: Wider is better., table: 2, a: wide, b: narrow, expect: above}
price: 1
full_scale: vtok train
"""


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture
def tiny(tiny_file: Path) -> Study:
    return read_study(tiny_file)


@pytest.fixture
def few(tmp_path: Path) -> Path:
    save_digits(tmp_path / "few.npz", train=64, val=30)
    return tmp_path / "few.npz"


def change(path: Path, **entries: object) -> Path:
    """Replace entries of a study, or remove those that are None."""
    content = yaml.safe_load(path.read_text()) | entries
    changed = path.with_name("changed.yaml")
    changed.write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}))
    read_study.cache_clear()
    return changed
