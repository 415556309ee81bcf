"""Backbones of ours in segmentation_models_pytorch, as the table in docs/dense.md states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
from timm.models import _registry
from torch import nn

import visualtokens

SHALLOW: dict[str, Any] = dict(depths=(1, 1, 1, 2))
PYRAMIDS = {
    "paca_vit_b0": {},
    "paca_vit_tiny": SHALLOW,
    "stvit_small": SHALLOW,
    "stvit_iso_64": SHALLOW,
    "pvt_v2_b0_pure": {},
    "swin_iso_64": SHALLOW,
}
EVERY_STRIDE = ["Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "UPerNet", "Segformer"]
DILATED = ["DeepLabV3", "DeepLabV3Plus"]


@pytest.fixture
def vt_resnet18_s32() -> Iterator[str]:
    """The registration in docs/dense.md, removed again."""
    name = "vt_resnet18_s32"

    def create(pretrained: bool = False, **options: Any) -> nn.Module:
        return timm.create_model("vt_resnet18", pretrained, **({"output_stride": 32} | options))

    _registry._model_entrypoints[name] = create
    yield name
    del _registry._model_entrypoints[name]


def build(kind: str, name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return getattr(smp, kind)(encoder_name=f"tu-{name}", encoder_weights=None, classes=5, **options)


def check(model: nn.Module, height: int = 64, width: int = 96) -> None:
    with torch.inference_mode():
        logits = model.eval()(torch.randn(1, 3, height, width))
    assert logits.shape == (1, 5, height, width)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("kind", ["Unet", "UPerNet"])
@pytest.mark.parametrize("name", ["paca_vit_b0", "stvit_small"])
def test_our_backbones_train(kind: str, name: str) -> None:
    model = build(kind, name)
    model(torch.randn(2, 3, 64, 96)).square().mean().backward()
    grads = [p.grad for p in model.encoder.parameters() if p.requires_grad]
    assert sum(g is not None and bool(g.abs().any()) for g in grads) > 0.9 * len(grads)


@pytest.mark.parametrize(
    ("kind", "name"),
    sorted(
        {(kind, name) for kind in EVERY_STRIDE for name in ("paca_vit_b0", "swin_iso_64")}
        | {(kind, name) for kind in ("Unet", "FPN") for name in PYRAMIDS}
    ),
)
def test_pyramids_fit_decoders_of_strides_that_double(kind: str, name: str) -> None:
    check(build(kind, name, **PYRAMIDS[name]))


@pytest.mark.parametrize("name", PYRAMIDS)
def test_pyramids_and_decoders_with_dilated_encoders(name: str) -> None:
    check(build("PAN", name, encoder_output_stride=32, **PYRAMIDS[name]), 256, 256)
    for kind in DILATED:  # which want stride 8 or 16
        with pytest.raises(TypeError, match="output_stride"):
            build(kind, name, **PYRAMIDS[name])


@pytest.mark.parametrize("kind", EVERY_STRIDE)
def test_vt_resnet_fits_them_with_an_output_stride_of_32(kind: str, vt_resnet18_s32: str) -> None:
    check(build(kind, vt_resnet18_s32, width=0.25))


def test_vt_resnet_fits_decoders_with_dilated_encoders(vt_resnet18_s32: str) -> None:
    check(build("PAN", vt_resnet18_s32, width=0.25), 256, 256)
    for kind in DILATED:
        model = build(kind, vt_resnet18_s32, encoder_output_stride=16, width=0.25)
        check(model)
        assert model.encoder(torch.randn(1, 3, 64, 64))[-1].shape[2:] == (4, 4)


@pytest.mark.parametrize(
    "name", ["vt_resnet18", "paca_vit_nano", "paca_vit_b0_32", "pvt_v2_b0_32", "deit_e252"]
)
def test_other_strides_fit_dpt_only(name: str) -> None:
    assert name in visualtokens.list_models()
    with pytest.raises(ValueError, match="Unsupported model downsampling pattern"):
        build("Unet", name)
    check(build("DPT", name, decoder_readout="cat" if name.startswith("deit") else "ignore"))
