"""``vtok models``: the list, and models.csv compared with the models."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable

import pytest
from timm.models import VisionTransformer

import visualtokens
from visualtokens.cli.models import FAMILIES, RELEASED, measure, read_sizes
from visualtokens.models import registry
from visualtokens.models.released_names import FAMILIES as CONVERTERS
from visualtokens.papers.figures import published

Vtok = Callable[..., tuple[int, str, str]]
QUICK = ("deit_e252", "paca_vit_nano", "paca_vit_b0_32", "pvt_v2_b0_32", "swin_iso_64", "vt_resnet18")


def test_every_model_is_listed_with_its_size(vtok: Vtok) -> None:
    code, text, err = vtok("models", "paca_vit_[ns]*")
    assert (code, err) == (0, "")
    assert text == (
        "model               parameters  GMACs    input  weights  family    paper\n"
        "paca_vit_nano           0.59 M   0.02    32×32  —        PaCa-ViT  paca-vit\n"
        "paca_vit_small         22.04 M   5.50  224×224  paca     PaCa-ViT  paca-vit\n"
        "paca_vit_small_mlp     22.64 M   5.86  224×224  paca     PaCa-ViT  paca-vit\n"
        "\n"
        "weights: files of the authors, for visualtokens.convert(file, 'paca'); — there are none\n"
    )
    document = json.loads(vtok("models", "--json")[1])
    assert [model["name"] for model in document["models"]] == visualtokens.list_models()
    assert document["models"][0].keys() == {
        *("name", "parameters", "macs", "family", "paper", "size", "weights"),
    }
    assert max(map(len, vtok("models")[1].splitlines())) <= 100


def test_filter(vtok: Vtok) -> None:
    for given in ("nano", "*_nano", "paca_vit_nano"):
        assert vtok("models", given)[1].splitlines()[1].startswith("paca_vit_nano ")
    assert vtok("models", "pca_vit_nano") == (
        2,
        "",
        "error: no match for 'pca_vit_nano'; the closest are paca_vit_nano, paca_vit_tiny, paca_vit_base; "
        "`vtok models` lists all 37\n",
    )
    assert vtok("models", "#") == (2, "", "error: no match for '#'; `vtok models` lists all 37\n")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in visualtokens.list_models()
    ],
)
def test_sizes_are_those_of_the_models(name: str) -> None:
    assert read_sizes()[name] == measure(name), "run: python -m visualtokens.cli.models"


def test_the_table_has_exactly_our_models() -> None:
    assert list(read_sizes()) == visualtokens.list_models(), "run: python -m visualtokens.cli.models"


def test_papers_and_released_weights_exist() -> None:
    assert {paper for _, paper in FAMILIES.values()} == {figure.paper for figure in published()}
    for pattern, family in RELEASED.items():
        assert fnmatch.filter(visualtokens.list_models(), pattern)
        for name in fnmatch.filter(visualtokens.list_models(), pattern):
            assert all(layout.accepts(name) for layout in CONVERTERS[family])


def test_models_that_other_code_registered(vtok: Vtok, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_names", list(registry._names))
    configs = {"vit_pocket_of_a_test": dict(patch_size=16, embed_dim=64, depth=2, num_heads=2)}
    cfg = dict(first_conv="patch_embed.proj", pool_size=None)
    registry.register_family(__name__, VisionTransformer, configs, default_cfg=cfg, levels=2)
    (model,) = json.loads(vtok("models", "pocket", "--json")[1])["models"]
    built = visualtokens.create_model("vit_pocket_of_a_test")
    assert model["parameters"] == sum(p.numel() for p in built.parameters())
    assert (model["family"], model["paper"], model["size"]) == ("test_models", "", [224, 224])
