"""Calibration: equal exchange rates, a schedule within its budget, and nothing changed on the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import visualtokens
from tests.reduce.helpers import randn, small_vit
from visualtokens.errors import UserError
from visualtokens.reduce import macs, plan, reduce
from visualtokens.reduce.families import encoder_of
from visualtokens.reduce.forward import reads_prefix_only
from visualtokens.tune.calibration import (
    Profile,
    _Meter,
    _shifted,
    calibrate,
    default_profile,
    output_change,
    plain_copy,
)

IMAGES = randn(6, 3, 32, 32)


def test_a_profile_multiplies_the_ratios_of_its_blocks() -> None:
    half = Profile((0.0, 1.0, 2.0))
    assert half.keep(torch.tensor(2.0).log().item(), 64, fewest=1) == (64, 32, 8)
    assert half.keep(0.0, 64, fewest=0) == (64, 64, 0)  # nothing reads the patches after the last block
    assert half.keep(99.0, 64, fewest=1) == (64, 1, 1)


@pytest.mark.parametrize("blocks", [1, 2, 3, 12, 24, 40])
def test_default_rates_have_one_entry_per_block(blocks: int) -> None:
    rates = default_profile(blocks).rates
    assert len(rates) == blocks
    assert max(rates) == 1
    assert min(rates) >= 0


def test_a_profile_is_scaled_to_just_below_the_limit() -> None:
    model = reduce(plain_copy(small_vit()), "random", keep=1.0)
    profile = default_profile(4)

    def cost(keep: object) -> float:
        return macs(model, keep=keep).total  # type: ignore[arg-type]

    limit = 0.5 * macs(model, keep=(64,) * 4).total
    scale = profile.scaled(cost, limit, 64, 0)
    assert cost(profile.keep(scale, 64, fewest=0)) <= limit < cost(profile.keep(scale - 0.05, 64, fewest=0))


@pytest.mark.parametrize(("head", "last"), [({}, 0), ({"global_pool": "avg", "class_token": False}, 1)])
def test_calibration_stays_within_its_share(head: dict[str, object], last: int) -> None:
    model = small_vit("vit_tiny_patch16_224", **head)
    with torch.inference_mode():
        expected = model(IMAGES)
    seen: list[tuple[int, int]] = []
    found = calibrate(
        model, IMAGES, share=0.6, method="merge", batch=4, progress=lambda *done: seen.append(done)
    )
    assert found.macs <= 0.6 * found.full_macs
    assert found.macs == macs(reduce(plain_copy(model), "merge", keep=found.keep)).total
    assert found.change <= found.default_change
    assert (found.keep[-1] == 0) == (last == 0)
    assert seen == [(i + 1, 8) for i in range(8)]  # 4 schedules of 2 batches
    with torch.inference_mode():
        assert torch.equal(model(IMAGES), expected)
    assert "reduction" not in model.__dict__


@pytest.mark.parametrize("head", [{}, {"global_pool": "avg", "class_token": False}, {"num_classes": 0}])
def test_the_measured_change_is_that_of_the_reduced_model(head: dict[str, object]) -> None:
    model = small_vit("vit_tiny_patch16_224", **head)
    keep, step = (60, 40, 20, 10), (60, 30, 20, 10)
    with torch.inference_mode():
        whole = [model(IMAGES)]
        vit = reduce(plain_copy(model), "weighted_merge", keep=1.0)
        assert reads_prefix_only(vit) == ("class_token" not in head)
        first, other, second = _Meter(encoder_of(vit), 64, [IMAGES], whole, None, 1)(keep, [keep, step])
        for found, schedule in ((first, keep), (other, keep), (second, step)):
            reduced = reduce(plain_copy(model), "weighted_merge", keep=schedule)
            torch.testing.assert_close(found, output_change(whole[0], reduced(IMAGES)))


def test_rates_move_from_blocks_that_change_the_output_to_those_that_do_not() -> None:
    def steady(value: float) -> Tensor:
        return torch.full((8,), value)

    before = [0.1] * 7
    changes = [steady(v) for v in (1.0, 1.0, 1.0, 0.1, 0.1, 0.1)]
    after = _shifted(before, changes, [1.0] * 6).rates
    assert after[0] == after[1] < after[2] < after[3] < after[4] == after[5] == 1
    assert after[6] == 0
    same = _shifted(before, [steady(0.5)] * 6, [1.0] * 6).rates
    assert same == pytest.approx((1.0,) * 6 + (0.0,))
    noise = torch.tensor([1.0, -1.0] * 4)  # changes within their error are treated alike, even if negative
    assert _shifted(before, [noise - 0.01, noise + 0.01] * 3, [1.0] * 6).rates == pytest.approx(
        (1.0,) * 6 + (0.0,), rel=0.02
    )


def test_output_change_is_relative_and_ignores_a_common_offset() -> None:
    z = randn(3, 7)
    assert output_change(z, z + 5).max() < 1e-10
    torch.testing.assert_close(output_change(z, 2 * z), torch.ones(3))
    torch.testing.assert_close(output_change(z, 2 * z), output_change(10 * z, 20 * z))


def test_wrong_calibrations_are_refused() -> None:
    with pytest.raises(UserError, match=r"share=1\.5 must be between 0 and 1"):
        calibrate(small_vit(), IMAGES, share=1.5, method="merge")
    with pytest.raises(UserError, match="conv cannot keep any number of tokens"):
        calibrate(small_vit(), IMAGES, method="conv")


def test_a_budget_with_images_reduces_in_one_call(tmp_path: Path) -> None:
    model = small_vit()
    found = plan(model, macs=0.6, images=IMAGES)
    assert found.calibrated_on == 6
    assert found.rates is not None
    visualtokens.reduce(model, macs=0.6, images=IMAGES)
    assert model.reduction.method == found.method == "weighted_merge"
    assert model.reduction.schedule.tokens(64) == found.keep
    assert macs(model).total == found.macs

    saved = found.save(tmp_path / "plan.json")
    assert json.loads(saved.read_text())["keep"] == list(found.keep)
    visualtokens.reduce(model, found.method, keep=str(saved))
    assert model.reduction.schedule.tokens(64) == found.keep


def test_a_schedule_or_a_budget_not_both() -> None:
    with pytest.raises(UserError, match="keep is the schedule itself"):
        visualtokens.reduce(small_vit(), keep=0.5, macs=0.5)
    with pytest.raises(UserError, match="give one budget, not 0"):
        visualtokens.reduce(small_vit())


@pytest.mark.parametrize(
    "content", ["{}", '{"keep": [1, 2, 3, 999], "patches": 64}', '{"keep": 3, "patches": 64}']
)
def test_files_that_are_no_plans(content: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(content)
    with pytest.raises(UserError, match="plan"):
        visualtokens.reduce(small_vit(), keep=str(file))
