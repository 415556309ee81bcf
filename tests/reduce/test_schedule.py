"""Schedules, and the cost of a reduced model against the running model and the published totals."""

from __future__ import annotations

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import visualtokens
from visualtokens.bench import count_macs
from visualtokens.errors import UserError
from visualtokens.papers import published
from visualtokens.papers.counting import skipped_clustering_macs, skipped_query_macs
from visualtokens.reduce import Schedule, macs, published_schedules
from visualtokens.reduce.schedule import PUBLISHED

# GMACs at levels 0 to 7, as the paper counts them; they round to every total of Tables 2 to 5.
TOTALS = {
    ("deit_small", "power_bert"): "4.2819 2.9346 2.5234 2.2677 2.0611 1.5177 1.2154 0.9633",
    ("deit_small", "kmedoids"): "4.4388 3.0380 2.6106 2.3457 2.1315 1.5714 1.2588 0.9966",
    ("deit_small", "kmeans"): "4.7290 3.2850 2.8095 2.5167 2.2793 1.6972 1.3531 1.0608",
    ("deit_e318", "power_bert"): "3.0092 2.1076 1.8091 1.6187 1.4618 1.0900 0.8931 0.7516",
    ("deit_e318", "kmedoids"): "3.1410 2.1962 1.8833 1.6845 1.5215 1.1363 0.9314 0.7835",
    ("deit_e252", "power_bert"): "1.9638 1.3844 1.1901 1.0539 0.9564 0.6973 0.5460 0.4570",
    ("deit_e252", "kmedoids"): "2.0700 1.4561 1.2504 1.1072 1.0043 0.7325 0.5742 0.4804",
}


def tokens(keep: object, patches: int = 196, blocks: int = 12) -> tuple[int, ...]:
    return Schedule.of(keep, blocks).tokens(patches)  # type: ignore[arg-type]


def test_a_list_has_one_entry_per_block() -> None:
    assert tokens([196, 100, 7, 2, 0], blocks=5) == (196, 100, 7, 2, 0)
    assert tokens([5, 7, 2, 3], blocks=4) == (5, 5, 2, 2)
    assert tokens([300, 250], blocks=2) == (196, 196)


def test_a_share_is_left_after_the_last_block() -> None:
    after = tokens(0.25)
    assert after[-1] == 49
    ratios = [b / a for a, b in zip((196, *after), after, strict=False)]
    assert max(ratios) - min(ratios) < 0.03  # the same in every block, except for rounding
    assert tokens(1.0) == (196,) * 12


def test_a_negative_number_is_removed_in_every_block_up_to_half() -> None:
    assert tokens(-13) == tuple(196 - 13 * (i + 1) for i in range(12))
    assert tokens(-100, blocks=5) == (98, 49, 25, 13, 7)
    assert tokens([-3, 0.5, -1], patches=10, blocks=3) == (7, 5, 4)


def test_published_schedules_are_those_of_the_tables() -> None:
    """Tables 3 to 5 as printed, except for the two misprints."""
    differing = []
    for figure in published("token-pooling", metric="tokens_after_block"):
        name = f"{figure.model.replace('deit_s', 'deit_small')}/{figure.variant.removeprefix('sparsity=')}"
        model, level = name.split("/")
        ours = PUBLISHED[model][int(level)]
        if " ".join(map(str, ours)) != figure.value:
            differing.append(name)
        assert len(ours) == 12
        assert tokens(name) == tuple(min(ours[: i + 1]) for i in range(12))
    assert differing == ["deit_small/6", "deit_e252/0"]
    assert len(published_schedules()) == 24


def test_published_schedules_scale_with_the_image() -> None:
    assert tokens("deit_small/3", patches=784)[5] == 4 * 85


@settings(max_examples=50)
@given(
    keep=st.lists(st.one_of(st.integers(-50, 300), st.floats(0, 1)), min_size=1, max_size=12),
    patches=st.integers(1, 400),
)
def test_counts_never_rise(keep: list[int | float], patches: int) -> None:
    after = tokens(keep, patches=patches, blocks=len(keep))
    assert all(0 <= b <= a <= patches for a, b in zip((patches, *after), after, strict=False))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (13, "keep=-13"),
        ([1, 2, 3], "3 entries, the model 12 blocks"),
        (1.5, "keep is 1.5"),
        ([0.5] * 11 + [True], r"keep\[11\] is True"),
        ([0.5] * 11 + ["x"], r"keep\[11\] is 'x'"),
        (float("nan"), "keep is nan"),
        ("deit_smal/3", "deit_small/"),
        ("deit_small/8", "deit_small/0 to deit_small/7"),
        ("deit_small", "deit_small/0 to"),
    ],
)
def test_errors_state_what_to_give(keep: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tokens(keep)


@pytest.mark.parametrize("base", PUBLISHED)
def test_every_published_total(base: str) -> None:
    with torch.device("meta"):
        model = timm.create_model({"deit_small": "deit_small_patch16_224"}.get(base, base))
    for method in [method for name, method in TOTALS if name == base]:
        for level, expected in enumerate(TOTALS[base, method].split()):
            visualtokens.reduce(model, method, keep=f"{base}/{level}", init="significance")
            total = macs(model).total
            skipped = skipped_clustering_macs(model) + skipped_query_macs(model)
            assert f"{(total + skipped) / 1e9:.4f}" == expected
        assert total == count_macs(model, (224, 224))


def test_cost_of_a_plain_model_by_parts() -> None:
    """Stem 196·768·e, head 1000·e, attention 4·n·e² + 2·n²·e, MLP 8·n·e²."""
    with torch.device("meta"):
        model = timm.create_model("deit_e318")
    n, e, cost = 197, 318, macs(model)
    assert (cost.stem, cost.head) == (196 * 768 * e, 1000 * e)
    assert cost.attention == (4 * n * e**2 + 2 * n**2 * e,) * 12
    assert cost.mlp == (8 * n * e**2,) * 12
    assert sum(cost.pooling) == 0


def test_weights_of_clustering_are_free() -> None:
    with torch.device("meta"):
        model = timm.create_model("deit_e252")
    for name in ("kmeans", "kmedoids"):
        costs = [
            macs(visualtokens.reduce(model, method, keep="deit_e252/3")).total
            for method in (name, f"weighted_{name}")
        ]
        assert costs[0] == costs[1]


def test_unknown_cost_is_refused() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_small_r26_s32_224")
    with pytest.raises(UserError, match="the cost of a HybridEmbed is unknown"):
        macs(model)
