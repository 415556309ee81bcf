"""The table and the plot of a trade-off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from tests.cli.processes import files_limited_to
from tests.reduce.helpers import randn, small_vit
from visualtokens.bench import count_macs
from visualtokens.errors import UserError
from visualtokens.reduce import reduce
from visualtokens.tune.tradeoff import Tradeoff, spread_schedules, tradeoff

IMAGES = randn(12, 3, 32, 32)
KEEP = (40, 20, 10, 4)


def measure(model: nn.Module, images: Tensor | None = None, labels: Tensor | None = None) -> Tradeoff:
    return tradeoff(model, {"mine": KEEP}, method="merge", images=images, labels=labels, batch=5, rounds=1)


@torch.inference_mode()
def outputs(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Of the full and the reduced model."""
    full = model(IMAGES)
    return full, reduce(model, "merge", keep=KEEP)(IMAGES)


def test_rows_are_the_full_model_and_each_schedule() -> None:
    model = small_vit()
    found = tradeoff(model, {"mine": KEEP, "half": 0.5}, method="merge", batch=2, rounds=1)
    assert [row.name for row in found.rows] == ["full", "mine", "half"]
    assert [row.keep for row in found.rows[:2]] == [(64,) * 4, KEEP]
    assert found.rows[0].macs == count_macs(model, (32, 32))
    assert found.rows[1].macs == count_macs(reduce(small_vit(), "merge", keep=KEEP), (32, 32))
    assert found.rows[0].speedup.median == 1
    assert all(row.quality is None and row.peak_bytes > 0 for row in found.rows)
    assert "reduction" not in model.__dict__


def test_quality_is_accuracy_if_there_are_labels() -> None:
    full, reduced = (out.argmax(1) for out in outputs(small_vit()))
    labels = full.clone()
    labels[:3] = (labels[:3] + 1) % 5  # three errors of the full model
    found = measure(small_vit(), IMAGES, labels)
    assert found.quality == "accuracy"
    assert [row.quality for row in found.rows] == pytest.approx(
        [9 / 12, (reduced == labels).float().mean().item()]
    )


def test_quality_is_agreement_without_labels() -> None:
    full, reduced = (out.argmax(1) for out in outputs(small_vit()))
    found = measure(small_vit(), IMAGES)
    assert found.quality == "agreement"
    assert [row.quality for row in found.rows] == pytest.approx(
        [1.0, (full == reduced).float().mean().item()]
    )


def test_quality_is_the_similarity_of_features_without_classes() -> None:
    full, reduced = outputs(small_vit(num_classes=0))
    found = measure(small_vit(num_classes=0), IMAGES)
    assert found.quality == "similarity"
    expected = F.cosine_similarity(reduced, full).mean().item()
    assert [row.quality for row in found.rows] == pytest.approx([1.0, expected], abs=1e-5)


@pytest.mark.parametrize("with_quality", [True, False])
def test_table_plot_and_json(tmp_path: Path, with_quality: bool) -> None:
    import matplotlib

    found = measure(small_vit(), IMAGES if with_quality else None)
    table = found.table()
    assert max(map(len, table.splitlines())) <= 100
    assert ("agreement" in table) == with_quality
    assert f"{sum(KEEP) / 4:.0f} → 4" in table
    assert json.loads(json.dumps(found.to_dict()))["rows"][1]["keep"] == list(KEEP)
    before = dict(matplotlib.rcParams)
    path = found.save(tmp_path / "new" / "curve.png")
    assert dict(matplotlib.rcParams) == before
    with files_limited_to(100), pytest.raises(OSError, match="File too large"):
        found.save(path)
    picture = Image.open(path).convert("L")  # still whole
    assert len(set(picture.tobytes())) > 2  # not blank


def test_wrong_file_types_and_reserved_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give a name that ends in"):
        measure(small_vit()).save(tmp_path / "curve.docx")
    with pytest.raises(UserError, match="'full' is the name of the full model"):
        tradeoff(small_vit(), {"full": KEEP}, method="merge", rounds=1)


def test_spread_schedules_have_the_cost_in_their_names() -> None:
    model = small_vit()
    full = count_macs(model, (32, 32))
    found = spread_schedules(model, "power_bert", shares=(0.8, 0.5))
    assert list(found) == ["80% of MACs", "50% of MACs"]
    for share, keep in zip((0.8, 0.5), found.values(), strict=True):
        cost = count_macs(reduce(small_vit(), "power_bert", keep=keep), (32, 32))
        assert 0.8 * share * full < cost <= share * full
