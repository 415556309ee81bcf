"""How the papers count, checked by hand on small models and against closed forms."""

from __future__ import annotations

import pytest
from torch import nn

from visualtokens.papers.counting import (
    clustering_macs,
    counts,
    macs_and_biases,
    macs_without,
    pixel_macs,
    pooled_macs_as_run,
    pyramid_macs,
    skipped_clustering_macs,
    total_macs,
)
from visualtokens.papers.models import MODELS

SIZE = (224, 224)


def model(paper: str, name: str, variant: str) -> nn.Module:
    return MODELS[paper, name, variant].build()


def test_biases_count_once_per_output() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(4, 5, 1, bias=False)
    )
    products = 10 * 12 * 8 * 27 + 10 * 12 * 8 * 4 * 4 + 20 * 24 * 4 * 5
    assert total_macs(model, (10, 12)) == products
    assert macs_and_biases(model, (10, 12)) == products + 10 * 12 * 8 + 20 * 24 * 4


def test_a_shared_layer_counts_every_call() -> None:
    layer = nn.Conv2d(3, 3, 1)
    model = nn.Sequential(layer, layer)
    assert counts(model, (4, 5)).outputs["0"] == 2 * 3 * 4 * 5
    assert macs_without(model, (4, 5), nn.Conv2d) == 0


def test_vision_transformer_closed_form() -> None:
    """Stem 196·768·C, head 1000·C, block 4·N·C² + 2·N²·C + 8·N·C²."""
    for row, c in [("row7", 192), ("row11", 252), ("row15", 318), ("row16", 384)]:
        n = 197
        expected = 196 * 768 * c + 1000 * c + 12 * (12 * n * c**2 + 2 * n**2 * c)
        assert total_macs(model("token-pooling", row, "deit"), SIZE) == expected


@pytest.mark.parametrize(
    ("name", "gmacs"),
    [
        ("paca_vit_b0", 0.62),
        ("paca_vit_b1", 2.27),
        ("paca_vit_b2", 4.39),
        ("pvt_v2_b0", 0.57),
        ("pvt_v2_b1", 2.11),
        ("pvt_v2_b2", 4.04),
    ],
)
def test_pyramids_have_the_known_gmacs(name: str, gmacs: float) -> None:
    """Known to two decimals."""
    computed = total_macs(model("paca-vit", name, "imagenet-1k"), SIZE) / 1e9
    assert computed == pytest.approx(gmacs, rel=0.005, abs=0.005)


@pytest.mark.parametrize("variant", ["sparsity=3 kmedoids", "sparsity=0 kmeans"])
def test_token_pooling_formula_is_the_count_of_the_running_model(variant: str) -> None:
    reduced = model("token-pooling", "deit_s", variant)
    macs = counts(reduced, SIZE).macs
    assert pooled_macs_as_run(reduced, SIZE) == macs[""]
    clustering = sum(n for name, n in macs.items() if name.endswith(".reduction.pool"))
    assert clustering_macs(reduced, SIZE) == clustering + skipped_clustering_macs(reduced)


def test_token_convolutions_of_vt_fpn() -> None:
    """They are all in the pyramid; their cost in closed form."""
    size = (473, 473)
    fpn = model("visual-transformers", "fpn_r50", "lip")
    vt_fpn = model("visual-transformers", "vt_fpn_r50", "lip")
    assert pixel_macs(fpn, size) == total_macs(fpn, size)
    tokens = total_macs(vt_fpn, size) - pixel_macs(vt_fpn, size)
    assert tokens == pyramid_macs(vt_fpn, size) - pixel_macs(vt_fpn, size, part="decoder.pyramid")
    # From and to four levels of C channels; keys, queries and two layers of the transformer.
    levels = 8 * 1024 * (256 + 512 + 1024 + 2048) + 4 * 2 * 32 * 1024 * 256
    assert tokens == levels + 32 * (2 * 1024 * 256 + 2 * 1024 * 1024)


@pytest.mark.parametrize(("name", "ratio"), [("vt_r50", 1.20), ("vt_r101", None)])
def test_pixel_macs_reproduce_vt_resnet_50_and_101(name: str, ratio: float | None) -> None:
    """Without token convolutions, Table 8 and the ratio of Table 1 agree within 0.3 %."""
    printed = {"vt_r50": 3.412, "vt_r101": 7.129}[name]
    ours = pixel_macs(model("visual-transformers", name, "advanced_recipe"), SIZE)
    assert ours / 1e9 == pytest.approx(printed, rel=0.003)
    if ratio is not None:
        theirs = total_macs(model("visual-transformers", "resnet50", "he2016"), SIZE)
        assert theirs / ours == pytest.approx(ratio, abs=0.005)
