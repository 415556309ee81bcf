"""The schedules that budgets are met with."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.reduce.small import small_vit
from visualtokens.bench import count_macs
from visualtokens.reduce.reduction import METHODS, Method, reduce
from visualtokens.tune.planning import ladder, steady, twin


@pytest.mark.parametrize("method", METHODS)
def test_every_rung_is_cheaper_than_the_one_before(method: Method) -> None:
    rungs = ladder(small_vit(), method, size=(32, 32))
    assert rungs[0].keep == (64,) * 4
    assert rungs[-1].macs < rungs[0].macs / 2
    for before, rung in pairwise(rungs):
        assert rung.macs < before.macs
        assert all(a >= b for a, b in zip((64, *rung.keep), rung.keep, strict=False))


@pytest.mark.parametrize("method", ["power_bert", "kmedoids", "merge"])
def test_costs_are_those_that_running_the_model_counts(method: Method) -> None:
    model = small_vit()
    rungs = ladder(model, method, size=(32, 32))
    for rung in rungs[:: len(rungs) // 4]:
        assert rung.macs == count_macs(reduce(twin(model), method, keep=rung.keep), (32, 32))


def test_steps_are_fine() -> None:
    """No budget between a fifth and the whole is missed by more than 6 %."""
    rungs = ladder(small_vit(), "power_bert", size=(32, 32))
    for before, rung in pairwise(rungs):
        if rung.macs > 0.2 * rungs[0].macs:
            assert rung.macs > 0.94 * before.macs


def test_a_head_that_reads_patches_keeps_one() -> None:
    model = small_vit("vit_tiny_patch16_224", global_pool="avg", class_token=False)
    assert ladder(model, "merge", size=(32, 32))[-1].keep == (1, 1, 1, 1)


def test_steady_keeps_the_same_share_in_every_block() -> None:
    assert steady(0.125, 4, 64, whole=1) == (64, 32, 16, 8)
    assert steady(0.0, 3, 64, fewest=1) == (1, 1, 1)


def test_a_twin_shares_the_weights_and_nothing_else() -> None:
    model = small_vit()
    images = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        expected = model(images)
        other = reduce(twin(model), "merge", keep=0.5)
        assert torch.equal(model(images), expected)
        assert torch.equal(twin(other)(images), expected)
    assert other.patch_embed.proj.weight is model.patch_embed.proj.weight
