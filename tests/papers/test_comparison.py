"""Computed costs against the published ones, and the table that shows both."""

from __future__ import annotations

import json
import math
from collections import defaultdict

import pytest
import timm

from visualtokens.bench import count_parameters
from visualtokens.errors import UserError
from visualtokens.papers import Published, Row, published, reasons, rows, table, to_dicts
from visualtokens.papers.figures import KINDS
from visualtokens.papers.models import MODELS, VT_ABLATIONS

PARAMETERS = {
    ("paca_vit_b0", "imagenet-1k"): 3_344_238,
    ("paca_vit_b1", "imagenet-1k"): 12_706_254,
    ("paca_vit_b2", "imagenet-1k"): 22_658_565,
    ("paca_vit_b0", "cifar-100"): 2_989_940,
    ("paca_vit_b1", "cifar-100"): 11_768_196,
    ("paca_vit_b2", "cifar-100"): 20_781_396,
    ("pvt_v2_b0", "imagenet-1k"): 3_666_760,
    ("pvt_v2_b1", "imagenet-1k"): 14_009_000,
    ("pvt_v2_b2", "imagenet-1k"): 25_362_856,
    ("pvt_v2_b0", "cifar-100"): 3_029_252,
    ("pvt_v2_b1", "cifar-100"): 11_932_068,
    ("pvt_v2_b2", "cifar-100"): 21_053_860,
    ("pvt_v2_b0_pure", "cifar-100"): 2_963_140,
    ("pvt_v2_b1_pure", "cifar-100"): 11_668_772,
    ("pvt_v2_b2_pure", "cifar-100"): 20_592_996,
}


def test_parameters_are_exact() -> None:
    computed = {key: count_parameters(MODELS["paca-vit", *key].build()) for key in PARAMETERS}
    assert computed == PARAMETERS


def test_every_entry_has_published_costs() -> None:
    for (paper, name, variant), entry in MODELS.items():
        figures = [f for f in published(paper, model=name) if f.variant == variant and f.is_cost]
        assert figures, (paper, name, variant)
        assert {f.metric for f in figures} <= set(entry.metrics)


@pytest.fixture(scope="module")
def costs() -> list[Row]:
    return rows()


def test_every_published_cost_is_computed(costs: list[Row]) -> None:
    assert [row.published for row in costs] == [f for f in published() if f.is_cost]
    assert all(row.computed is not None for row in costs)


def by_kind(costs: list[Row], kind: str) -> list[Row]:
    found = [r for r in costs if r.reason and r.reason.kind == kind]
    assert found
    return found


def unit(row: Row) -> float:
    """One unit in the last printed digit."""
    return 10.0**-row.published.decimals


def test_every_difference_has_a_reason_and_only_those(costs: list[Row]) -> None:
    differ = {r.published.key for r in costs if r.agrees is False}
    assert differ == set(reasons())
    assert {reason.kind for reason in reasons().values()} == set(KINDS)
    assert not [r for r in costs if r.unexplained]
    assert len(differ) == 99


def test_rounding_is_less_than_one_unit(costs: list[Row]) -> None:
    """Cut off, rounded up, given in whole millions, or the difference of two rounded totals."""
    for row in by_kind(costs, "rounding"):
        figure, text = row.published, row.reason.text if row.reason else ""
        if text.startswith("cut off"):
            assert math.floor(row.computed / unit(row)) == round(figure.number / unit(row))
        elif text.startswith("rounded up"):
            assert math.ceil(row.computed / unit(row)) == round(figure.number / unit(row))
        elif text.startswith("in whole millions"):
            assert figure.number in (round(row.computed), math.ceil(row.computed))
        else:
            assert text == "the difference of the two printed totals"
            level = figure.variant.split()[0]
            totals = {
                f.variant.split()[1]: f.number
                for f in published(figure.paper, figure.table, model=figure.model, metric="gflops")
                if f.variant.startswith(level)
            }
            difference = totals[figure.variant.split()[1]] - totals["power-bert"]
            assert round(difference, figure.decimals) == figure.number


# The second count leaves these differences: the paper's stage has 10 M more than ours (VT-R50, VT-R101).
NEARLY = {("1", "vt_r50"): 0.08, ("8", "vt_r50"): 0.003, ("8", "vt_r101"): 0.003}


def test_other_ways_of_counting_give_the_printed_figures(costs: list[Row]) -> None:
    for row in by_kind(costs, "counting"):
        figure = row.published
        assert row.other is not None, figure
        rest = NEARLY.get((figure.table, figure.model))
        if Row(figure, row.other).agrees:
            continue
        if "cut off" in row.reason.text:
            assert 0 < row.other - figure.number < unit(row)
        else:
            assert rest is not None, figure
            assert row.other == pytest.approx(figure.number, rel=rest)


def test_undescribed_layer_is_one_token_convolution(costs: list[Row]) -> None:
    """Without projector: 1498 and 3159 M are ours plus 256·1024·16 MACs."""
    found = by_kind(costs, "model")
    assert [round(r.computed + 256 * 1024 * 16 / 1e6) for r in found] == [1498, 3159]
    assert [r.published.number for r in found] == [1498, 3159]


def printed(table: str, model: str, variant: str, metric: str) -> float:
    found = [f for f in published("visual-transformers", table, model=model, metric=metric)]
    return next(f.number for f in found if f.variant == variant)


def test_contradictions_of_table_1() -> None:
    """The ratios against those that follow from the totals of Tables 2 and 8."""
    resnet, vt = printed("2", "resnet18", "default_recipe", "mparams"), 11.7
    assert printed("2", "vt_r18", "default_recipe", "mparams") == vt
    assert resnet / vt == 1.0
    sizes = {d: timm.create_model(f"resnet{d}") for d in (18, 34)}
    for depth, total, ratio in ((18, 11.7, 1.06), (34, 21.9, 1.03)):
        model = sizes[depth]
        stage = count_parameters(model.layer4) / 1e6
        kept = count_parameters(model) / 1e6 - stage - count_parameters(model.fc) / 1e6
        assert stage / (total - kept - 1.025) == pytest.approx(ratio, abs=0.007)  # fc: 1024·1000 + 1000
    # VT-R34: both ratios of Table 1 need the same total, which no table prints
    total, kept, stage = 3663.8, 3022.0, 642.25
    assert total / (kept + stage / 5.0) == pytest.approx(1.16, abs=0.005)
    assert kept + stage / 5.0 == pytest.approx(3150, abs=1)
    # VT-R50: 6.1 follows from the total of Table 8
    assert round(809.24 / (1e3 * printed("8", "vt_r50", "advanced_recipe", "gflops") - 3278.92), 1) == 6.1


def test_contradictions_of_the_other_tables(costs: list[Row]) -> None:
    # Eq. 1: the filters W_A and the weighted mean, at 14×14 pixels of 256 channels and 16 tokens
    filters = 2 * 196 * 256 * 16 / 1e6
    assert filters == pytest.approx(1.6, abs=0.01)
    for model, more in (("vt_r18", 31), ("vt_r34", 34)):
        flops = {v: printed("3", model, f"tokenizer={v}", "mflops") for v in ("filter", "pool")}
        assert flops["filter"] - flops["pool"] == more
        assert printed("4", model, "recurrent=yes", "mflops") < printed("4", model, "recurrent=no", "mflops")
    # stages that VT keeps: ResNet-101 − ResNet-50
    by_model = {(r.published.table, r.published.model, r.published.metric): r for r in costs}
    more = by_model["8", "resnet101", "mparams"].computed - by_model["8", "resnet50", "mparams"].computed
    assert more == pytest.approx(18.99, abs=0.01)
    assert printed("8", "vt_r50", "advanced_recipe", "mparams") + more == pytest.approx(40.4, abs=0.05)
    deeper = by_model["10", "fpn_r101", "gflops_total"].computed
    deeper -= by_model["10", "fpn_r50", "gflops_total"].computed
    assert printed("10", "fpn_r101", "lip", "gflops_total") - deeper == pytest.approx(37.35, abs=0.01)
    assert printed("10", "vt_fpn_r50", "lip", "gflops_total") + deeper == pytest.approx(43.45, abs=0.01)
    # CBAM: every other figure of the table is as computed
    cbam = [r for r in costs if "+cbam" in r.published.model and "34" not in r.published.model]
    assert len(cbam) == 6
    assert all(r.agrees or Row(r.published, r.other).agrees for r in cbam)
    # Token Pooling: Table 2 has the totals with one more digit
    totals = {f.variant: f.number for f in published("token-pooling", "2", model="row11", metric="gflops")}
    assert totals["kmedoids"] - totals["power-bert"] == pytest.approx(0.07)


def test_pixel_macs_of_segmenters_are_within_1_percent(costs: list[Row]) -> None:
    """The paper does not count the token convolutions."""
    segmenters = [r for r in costs if "fpn_r" in r.published.model]
    assert len(segmenters) == 16
    for row in segmenters:
        assert row.other == pytest.approx(row.published.number, rel=0.01)


def test_released_code_of_stvit_is_as_printed_except_one(costs: list[Row]) -> None:
    released = [
        (r.other, r.published) for r in costs if r.other_name == "released code" and r.other is not None
    ]
    assert len(released) == 6
    differ = [(round(n, 2), f.value) for n, f in released if round(n, f.decimals) != f.number]
    assert differ == [(4.36, "4.3")]


def test_which_costs_of_visual_transformers_are_as_printed(costs: list[Row]) -> None:
    agree = {
        (r.published.table, r.published.model, r.published.variant, r.published.metric)
        for r in costs
        if r.agrees and r.published.model.startswith("vt_")
    }
    assert agree == {
        ("2", "vt_r18", "default_recipe", "mparams"),
        ("2", "vt_r34", "default_recipe", "mparams"),
        ("3", "vt_r18", "tokenizer=cluster", "mflops"),
        ("3", "vt_r34", "tokenizer=cluster", "mflops"),
        ("5", "vt_r18", "mixer=none", "mflops"),
        ("5", "vt_r18", "mixer=graphconv", "mflops"),
        ("5", "vt_r34", "mixer=none", "mflops"),
        ("5", "vt_r34", "mixer=graphconv", "mflops"),
        ("5", "vt_r34", "mixer=transformer", "mflops"),
        ("6", "vt_r18", "tokens=16", "mflops"),
        ("6", "vt_r18", "tokens=32", "mflops"),
        ("6", "vt_r34", "tokens=16", "mflops"),
        ("6", "vt_r34", "tokens=32", "mflops"),
        ("8", "vt_r18", "advanced_recipe", "mparams"),
        ("8", "vt_r50", "advanced_recipe", "mparams"),
        ("9", "vt_fpn_r50", "coco-stuff", "gflops_total"),
        ("9", "vt_fpn_r101", "coco-stuff", "gflops_total"),
    }


def test_visual_transformers_prints_several_costs_for_one_model(costs: list[Row]) -> None:
    """All these variants are the default model; ours costs what Table 6 prints, to the million."""
    same = {v for v, options in VT_ABLATIONS.items() if not options} | {"default_recipe", "advanced_recipe"}
    printed, computed = defaultdict(set), defaultdict(set)
    for r in costs:
        figure = r.published
        if figure.model in ("vt_r18", "vt_r34") and figure.variant in same and "flops" in figure.metric:
            scale = 1000 if figure.metric == "gflops" else 1
            printed[figure.model].add(round(scale * figure.number))
            computed[figure.model].add(round(scale * (r.computed or 0)))
    assert printed == {"vt_r18": {1569, 1570, 1579, 1580}, "vt_r34": {3236, 3246, 3280, 3299}}
    assert computed == {"vt_r18": {1579}, "vt_r34": {3299}}


def test_results_are_added_on_request() -> None:
    assert len(rows("paca-vit", "2")) == 16
    both = rows("paca-vit", "2", all=True)
    assert len(both) == 38
    assert {r.published.metric for r in both if r.computed is None} == {"top1", "images_per_s_rtx8000"}
    assert rows("paca-vit", "text-4.1") == []
    assert len(rows("paca-vit", "text-4.1", all=True)) == 2


def test_unknown_papers_and_tables() -> None:
    with pytest.raises(UserError, match="unknown paper 'vt'"):
        rows("vt")
    with pytest.raises(UserError, match="unknown table of stvit 'III'"):
        rows("stvit", "III")


def row(value: str, computed: float | None, metric: str = "mparams") -> Row:
    return Row(Published("p", "1", "m", "v", "8x8", metric, value), computed)


def test_difference_and_agreement() -> None:
    assert row("3.4", 3.344).difference == pytest.approx(-1.647, abs=1e-3)
    assert row("3.4", 3.344).agrees is False
    assert row("3.4", 3.36).agrees is True
    assert row("28", 28.49).agrees is True
    assert row("28", 28.51).agrees is False
    assert row("28", None).difference is None
    assert row("28", None).agrees is None


def test_table_of_one_table() -> None:
    lines = table(rows("paca-vit", "2")).splitlines()
    assert lines[0] == "paca-vit, table 2"
    assert lines[1].split() == ["model", "input", "metric", "published", "computed", "difference"]
    assert lines[3].split() == [
        *("paca_vit_b0", "imagenet-1k", "224x224", "mparams", "3.4", "3.344", "-1.6", "%", "rounding", "[1]")
    ]
    assert lines[4].endswith("as printed")
    assert "[1] rounding: rounded up, unlike the other parameters of the paper" in lines
    assert lines[-2:] == [
        "16 figures compared: 11 as printed, 5 differ.",
        "Differences by reason: 5 rounding.",
    ]


def test_difference_without_a_reason_is_unexplained() -> None:
    odd = row("3.4", 5.0)
    assert odd.unexplained
    assert not row("3.4", 3.4).unexplained
    assert not row("3.4", None).unexplained
    assert "unexplained" in table([odd]).splitlines()[2]
    assert table([odd]).splitlines()[-1] == "Differences by reason: 1 unexplained."
    assert "reason" not in to_dicts([odd])[0]


def test_table_of_all_figures(costs: list[Row]) -> None:
    lines = table(rows(all=True)).splitlines()
    assert max(map(len, lines)) <= 100
    agree = sum(bool(r.agrees) for r in costs)
    assert lines[-3:] == [
        f"{len(costs)} figures compared: {agree} as printed, {len(costs) - agree} differ.",
        "Differences by reason: 42 counting, 30 contradiction, 25 rounding, 2 model.",
        f"{len(published()) - len(costs)} results listed as published; they are not computed.",
    ]
    assert any("196 … 173" in line for line in lines)


def test_second_way_of_counting_is_a_second_line(costs: list[Row]) -> None:
    (row,) = [r for r in costs if r.published.model == "vt_r50" and r.published.metric == "gflops"]
    assert row.other_name == "pixel MACs"
    assert row.other == pytest.approx(3.4021, abs=1e-4)
    lines = table([row]).splitlines()
    assert "3.58248" in lines[2]
    assert "pixel MACs" in lines[3]
    assert "3.40213" in lines[3]
    assert to_dicts([row])[0]["pixel MACs"] == row.other


def test_missing_models_are_counted_but_not_listed() -> None:
    missing = [row("4.4", None, "gflops"), row("25", None)]
    assert table(missing).splitlines() == [
        "0 figures compared: 0 as printed, 0 differ.",
        "2 costs of models that this version does not include.",
    ]
    assert table([]) == "No published costs."


def test_to_dicts_is_json() -> None:
    saved = json.loads(json.dumps(to_dicts(rows("paca-vit", "2", all=True))))
    assert saved[0] == {
        "paper": "paca-vit",
        "table": "2",
        "model": "pvt_v2_b0",
        "variant": "imagenet-1k",
        "input": "224x224",
        "metric": "mparams",
        "value": "3.7",
        "computed": 3.66676,
        "difference_percent": pytest.approx(-0.898, abs=1e-3),
        "agrees": True,
    }
    assert saved[2]["computed"] is saved[2]["difference_percent"] is saved[2]["agrees"] is None
