"""published.csv: complete, readable, and as printed where it was checked by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from visualtokens.errors import UserError
from visualtokens.papers import Published, published, schedule
from visualtokens.papers.figures import COST_METRICS

ROWS = {
    "visual-transformers": {
        "1": 13, "2": 16, "3": 12, "4": 8, "5": 12, "6": 18, "7": 8, "8": 54, "9": 12, "10": 12,
    },
    "paca-vit": {"2": 38, "3": 45, "4": 68, "text-4.1": 2},
    "stvit": {"I": 6, "II": 21},
    "token-pooling": {"2": 104, "3": 120, "4": 72, "5": 72, "H": 6},
}  # fmt: skip


def test_every_table_is_complete() -> None:
    tables = Counter((f.paper, f.table) for f in published())
    assert tables == {(paper, table): n for paper, counts in ROWS.items() for table, n in counts.items()}
    assert len(published()) == 719


def test_every_figure_appears_once() -> None:
    keys = Counter((f.paper, f.table, f.model, f.variant, f.input, f.metric) for f in published())
    assert max(keys.values()) == 1


# Read from the papers.
PRINTED = [
    ("visual-transformers", "1", "vt_r50", "ratio_to_resnet", "flops_stage5_ratio", 6.1),
    ("visual-transformers", "2", "vt_r34", "default_recipe", "mflops", 3280),
    ("visual-transformers", "5", "vt_r34", "mixer=graphconv", "top1", 73.7),
    ("visual-transformers", "8", "vt_r101", "advanced_recipe", "gflops", 7.129),
    ("visual-transformers", "9", "vt_fpn_r50", "coco-stuff", "gflops_fpn", 8.5),
    ("visual-transformers", "10", "fpn_r101", "lip", "miou", 47.35),
    ("visual-transformers", "8", "resnet101+cbam", "woo2018", "gflops", 7.581),
    ("paca-vit", "2", "paca_vit_b2", "imagenet-1k", "top1", 82.28),
    ("paca-vit", "2", "regnety_4g", "imagenet-1k", "mparams", 21.0),
    ("paca-vit", "3", "deit_s", "cifar-100", "top1", 69.78),
    ("paca-vit", "4", "resnet50", "mask-rcnn-1x coco", "ap_mask", 37.1),
    ("paca-vit", "3", "pvt_v2_b1_pure", "cifar-100", "images_per_s_rtx8000", 1495.8),
    ("paca-vit", "4", "paca_vit_b0", "mask-rcnn-1x coco", "train_gb_per_image", 1.85),
    ("stvit", "I", "stvit_large", "", "gflops", 15.6),
    ("token-pooling", "2", "row12", "weighted-kmedoids", "top1", 80.1),
    ("token-pooling", "4", "deit_e318", "sparsity=6 kmedoids", "gflops", 0.93),
    ("token-pooling", "H", "deit_e252", "same-accuracy v100", "images_per_s_pooled", 2190),
]


def test_figures_as_printed() -> None:
    for paper, table, model, variant, metric, value in PRINTED:
        (figure,) = [f for f in published(paper, table, model=model, metric=metric) if f.variant == variant]
        assert figure.number == value


def test_filters() -> None:
    assert published("stvit", "I", model="stvit_base") == [
        Published("stvit", "I", "stvit_base", "", "224x224", "mparams", "52"),
        Published("stvit", "I", "stvit_base", "", "224x224", "gflops", "9.9"),
    ]
    assert {f.paper for f in published(table="2")} == {"visual-transformers", "paca-vit", "token-pooling"}
    assert {f.metric for f in published(metric="miou")} == {"miou"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(paper="paca"), "unknown paper 'paca'; did you mean 'paca-vit'?"),
        (
            dict(paper="paca-vit", table="9"),
            "unknown table of paca-vit '9'; choose from 2, 3, 4, text-4.1",
        ),
        (dict(table="X"), "unknown table 'X'"),
        (dict(paper="stvit", model="stvit_smal"), "did you mean 'stvit_small'?"),
        (dict(metric="gflop"), "did you mean 'gflops'?"),
    ],
)
def test_unknown_names_suggest_known_ones(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as error:
        published(**arguments)
    assert message in str(error.value)


def test_numbers_and_sizes_parse() -> None:
    for figure in published():
        if figure.metric == "tokens_after_block":
            assert all(token.isdigit() for token in figure.value.split())
        else:
            assert figure.number > 0
            assert figure.value == f"{figure.number:.{figure.decimals}f}"
        assert figure.size is None or min(figure.size) >= 32
    assert Published("", "", "", "", "800x1216", "", "").size == (800, 1216)


def test_costs_are_flops_and_parameters() -> None:
    metrics = {f.metric for f in published()}
    assert metrics >= COST_METRICS
    assert all(("flops" in m or "params" in m) == (m in COST_METRICS) for m in metrics)


def test_schedules_differ_from_print_in_two_misprints() -> None:
    """The library's schedules have one entry for each of the 12 blocks; two printed ones do not."""
    corrected = []
    for figure in published("token-pooling", metric="tokens_after_block"):
        tokens = schedule(figure.model, int(figure.variant.removeprefix("sparsity=")))
        assert len(tokens) == 12
        if tokens != tuple(map(int, figure.value.split())):
            corrected.append((figure.model, figure.variant, figure.value, tokens))
    assert corrected == [
        (
            "deit_s",
            "sparsity=6",
            "186 162 102 56 13 4 2 2 0 0 0 0 0",
            (186, 162, 102, 56, 13, 4, 2, 2, 0, 0, 0, 0),
        ),
        (
            "deit_e252",
            "sparsity=0",
            "196 196 196 195 193 189 177 177 177 177 177",
            (196, 196, 196, 195, 193, 189, 177, 177, 177, 177, 177, 177),
        ),
    ]


def test_unknown_schedules() -> None:
    with pytest.raises(UserError, match="'deit_b'"):
        schedule("deit_b", 0)
    with pytest.raises(UserError, match="'sparsity=8'"):
        schedule("deit_s", 8)
