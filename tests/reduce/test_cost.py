"""Multiply-adds: the formula, the running model, and what Token Pooling prints."""

from __future__ import annotations

import pytest
import timm
import torch

import visualtokens
from visualtokens.bench import count_macs
from visualtokens.errors import UserError
from visualtokens.papers.token_pooling import METHODS, Setting, idle
from visualtokens.reduce import macs

# In GMACs, levels 0 to 7, as the paper counts them; they round to every total of Tables 2 to 5.
TOTALS = {
    ("deit_small", "power_bert"): "4.2819 2.9346 2.5234 2.2677 2.0611 1.5177 1.2154 0.9633",
    ("deit_small", "kmedoids"): "4.4388 3.0380 2.6106 2.3457 2.1315 1.5714 1.2588 0.9966",
    ("deit_small", "kmeans"): "4.7290 3.2850 2.8095 2.5167 2.2793 1.6972 1.3531 1.0608",
    ("deit_e318", "power_bert"): "3.0092 2.1076 1.8091 1.6187 1.4618 1.0900 0.8931 0.7516",
    ("deit_e318", "kmedoids"): "3.1410 2.1962 1.8833 1.6845 1.5215 1.1363 0.9314 0.7835",
    ("deit_e252", "power_bert"): "1.9638 1.3844 1.1901 1.0539 0.9564 0.6973 0.5460 0.4570",
    ("deit_e252", "kmedoids"): "2.0700 1.4561 1.2504 1.1072 1.0043 0.7325 0.5742 0.4804",
}
SIZE = (224, 224)


def build(base: str, level: int, method: str) -> torch.nn.Module:
    with torch.device("meta"):
        return Setting(base, level, method).build()


@pytest.mark.parametrize(("base", "method"), TOTALS)
def test_every_published_total(base: str, method: str) -> None:
    for level, expected in enumerate(TOTALS[base, method].split()):
        model = build(base, level, method)
        assert f"{(macs(model).total + idle(model, SIZE)) / 1e9:.4f}" == expected


@pytest.mark.parametrize("level", [0, 3, 7])
@pytest.mark.parametrize(("base", "method"), TOTALS)
def test_the_running_model_counts_what_the_formula_says(base: str, method: str, level: int) -> None:
    model = build(base, level, method)
    assert count_macs(model, SIZE) == macs(model).total


def test_weights_cost_nothing() -> None:
    for name in ("kmeans", "kmedoids"):
        model = build("deit_e252", 3, METHODS[name])
        plain = macs(model).total
        visualtokens.reduce(model, f"weighted_{name}", keep="deit_e252/3", init="significance")
        assert macs(model).total == plain


def test_the_parts_of_a_plain_model() -> None:
    """Stem 196·768·e, head 1000·e, block 4·n·e² + 2·n²·e and 8·n·e²."""
    with torch.device("meta"):
        model = timm.create_model("deit_e318")
    n, e, cost = 197, 318, macs(model)
    assert cost.stem == 196 * 768 * e
    assert cost.head == 1000 * e
    assert cost.attention == (4 * n * e**2 + 2 * n**2 * e,) * 12
    assert cost.mlp == (8 * n * e**2,) * 12
    assert sum(cost.pooling) == 0
    assert cost.total == count_macs(model, SIZE)


def test_what_cannot_be_known_is_refused() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_small_r26_s32_224")
    with pytest.raises(UserError, match="count_macs"):
        macs(model)
