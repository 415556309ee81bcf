"""PVTv2, the baseline of PaCa-ViT: published sizes, and the differences to timm's network."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.models.pvt_v2 import PyramidVisionTransformerV2

from visualtokens.bench import count_parameters


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("pvt_v2_b0_32", 3_029_252),
        ("pvt_v2_b1_32", 11_932_068),
        ("pvt_v2_b2_32", 21_053_860),
        ("pvt_v2_b0_pure_32", 2_963_140),
        ("pvt_v2_b1_pure_32", 11_668_772),
        ("pvt_v2_b2_pure_32", 20_592_996),
    ],
)
def test_parameters_are_exact(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    assert isinstance(model, PyramidVisionTransformerV2)
    assert model.num_classes == 100
    assert count_parameters(model) == parameters


def test_pure_has_no_spatial_reduction() -> None:
    with torch.device("meta"):
        reduced, pure = timm.create_model("pvt_v2_b0"), timm.create_model("pvt_v2_b0_pure")
    removed = [n for n in reduced.state_dict() if ".attn.sr." in n or ".attn.norm." in n]
    assert pure.state_dict().keys() == reduced.state_dict().keys() - set(removed)
    assert count_parameters(pure) == count_parameters(reduced) - sum(
        reduced.state_dict()[n].numel() for n in removed
    )


def test_strides_of_the_small_stem() -> None:
    features = timm.create_model("pvt_v2_b0_32", features_only=True).eval()
    assert features.feature_info.reduction() == [1, 2, 4, 4]
    with torch.no_grad():
        assert [f.shape[-1] for f in features(torch.randn(1, 3, 32, 32))] == [32, 16, 8, 8]
