"""The table and the curve of a trade-off."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from tests.reduce.small import small_vit
from visualtokens.bench import count_macs, interleave
from visualtokens.errors import UserError
from visualtokens.reduce.reduction import reduce
from visualtokens.tune import planning as measure
from visualtokens.tune.tradeoff import spread_schedules, tradeoff

IMAGES = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(0))
KEEP = (40, 20, 10, 4)


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call per turn and no repeats: what is measured does not matter here."""
    monkeypatch.setattr(measure, "interleave", partial(interleave, min_seconds=0.0, retries=0))


@torch.inference_mode()
def outputs(*, keep: tuple[int, ...] | None, classes: int = 5) -> Tensor:
    model: nn.Module = small_vit(num_classes=classes)
    return (model if keep is None else reduce(model, "merge", keep=keep))(IMAGES)


def test_rows_are_the_whole_model_and_each_schedule() -> None:
    model = small_vit()
    found = tradeoff(model, {"mine": KEEP, "half": 0.5}, method="merge", batch=2, rounds=1)
    assert [row.name for row in found.rows] == ["full", "mine", "half"]
    assert [row.keep for row in found.rows[:2]] == [(64,) * 4, KEEP]
    assert found.rows[0].macs == count_macs(model, (32, 32))
    assert found.rows[1].macs == count_macs(reduce(small_vit(), "merge", keep=KEEP), (32, 32))
    assert found.rows[0].speedup.median == 1
    assert all(row.quality is None and row.peak_bytes > 0 for row in found.rows)
    assert "reduction" not in model.__dict__


def test_with_labels_quality_is_accuracy() -> None:
    labels = outputs(keep=None).argmax(1)
    labels[:3] = (labels[:3] + 1) % 5  # the whole model is wrong about three
    found = tradeoff(
        small_vit(), {"k": KEEP}, method="merge", images=IMAGES, labels=labels, batch=5, rounds=1
    )
    right = (outputs(keep=KEEP).argmax(1) == labels).sum().item()
    assert found.quality == "accuracy"
    assert [row.quality for row in found.rows] == pytest.approx([9 / 12, right / 12])


def test_without_labels_quality_is_agreement_with_the_whole_model() -> None:
    found = tradeoff(small_vit(), {"k": KEEP}, method="merge", images=IMAGES, batch=5, rounds=1)
    same = (outputs(keep=KEEP).argmax(1) == outputs(keep=None).argmax(1)).sum().item()
    assert found.quality == "agreement"
    assert [row.quality for row in found.rows] == pytest.approx([1.0, same / 12])


def test_without_classes_quality_is_the_similarity_of_features() -> None:
    model = small_vit(num_classes=0)
    found = tradeoff(model, {"k": KEEP}, method="merge", images=IMAGES, batch=5, rounds=1)
    close = F.cosine_similarity(outputs(keep=KEEP, classes=0), outputs(keep=None, classes=0)).mean().item()
    assert found.quality == "similarity"
    assert [row.quality for row in found.rows] == pytest.approx([1.0, close], abs=1e-5)


@pytest.mark.parametrize("judged", [True, False])
def test_table_picture_and_json(tmp_path: Path, judged: bool) -> None:
    images = IMAGES if judged else None
    found = tradeoff(small_vit(), {"mine": KEEP}, method="merge", images=images, batch=2, rounds=1)
    table = found.table()
    assert max(map(len, table.splitlines())) <= 100
    assert ("agreement" in table) == judged
    assert f"{sum(KEEP) / 4:.0f} → 4" in table
    assert json.loads(json.dumps(found.to_dict()))["rows"][1]["keep"] == list(KEEP)
    picture = Image.open(found.save(tmp_path / "new" / "curve.png")).convert("L")
    assert len(set(picture.tobytes())) > 2  # something is drawn


def test_other_files_and_a_taken_name_are_refused(tmp_path: Path) -> None:
    found = tradeoff(small_vit(), {"mine": KEEP}, method="merge", batch=1, rounds=1)
    with pytest.raises(UserError, match="give a name that ends in"):
        found.save(tmp_path / "curve.docx")
    with pytest.raises(UserError, match="'full' is the name of the whole model"):
        tradeoff(small_vit(), {"full": KEEP}, method="merge", rounds=1)


def test_spread_schedules_cost_the_shares_they_are_named_after() -> None:
    model = small_vit()
    full = count_macs(model, (32, 32))
    found = spread_schedules(model, "power_bert", shares=(0.8, 0.5))
    assert list(found) == ["80% of MACs", "50% of MACs"]
    for share, keep in zip((0.8, 0.5), found.values(), strict=True):
        cost = count_macs(reduce(small_vit(), "power_bert", keep=keep), (32, 32))
        assert 0.94 * share * full < cost <= share * full
