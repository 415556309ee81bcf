"""The reduced model under its own name: built, saved, loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch

from tests.reduce.small import ARGS, small_vit
from visualtokens.errors import UserError
from visualtokens.reduce.reduction import reduce
from visualtokens.reduce.trainable import NAME

BASE = "deit_tiny_patch16_224"
KEEP = [40, 20, 20, 0]
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_it_is_its_base_with_the_reduction() -> None:
    base = small_vit()
    model = timm.create_model(NAME, base=BASE, method="kmedoids", keep=KEEP, **ARGS).eval()
    model.load_state_dict(base.state_dict())
    reduce(base, "kmedoids", keep=KEEP, carry=False)
    with torch.inference_mode():
        assert torch.equal(model(IMAGES), base(IMAGES))


def test_timm_saves_and_loads_it(tmp_path: Path) -> None:
    args = ARGS | dict(base=BASE, method="merge", keep=KEEP)
    model = timm.create_model(NAME, **args).eval()
    timm.models.save_for_hf(model, tmp_path, model_args=args, safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert loaded.reduction == model.reduction
    with torch.inference_mode():
        assert torch.equal(loaded(IMAGES), model(IMAGES))


def test_it_prepares_images_as_its_base_does() -> None:
    cfg = timm.get_pretrained_cfg("vit_tiny_patch16_224")
    model = timm.create_model(NAME, base="vit_tiny_patch16_224", depth=12, keep=0.5)
    assert model.pretrained_cfg["mean"] == cfg.mean == (0.5, 0.5, 0.5)
    assert model.pretrained_cfg["architecture"] == NAME
    assert model.pretrained_cfg["classifier"] == "head"


def test_features_are_those_of_all_patches() -> None:
    model = timm.create_model(NAME, base=BASE, keep=KEEP, features_only=True, **ARGS)
    assert [m.shape for m in model(IMAGES)] == [(2, 24, 8, 8)] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(base="deit_tinny"), "unknown base 'deit_tinny'"),
        (dict(method="kmedoid"), "unknown method 'kmedoid'; did you mean 'kmedoids'"),
        (dict(method="soft"), "price=None with method='soft'"),
        (dict(method="merge", price=0.1), "price=0.1 with method='merge'"),
    ],
)
def test_what_does_not_exist_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        timm.create_model(NAME, **({"base": BASE, "keep": KEEP} | ARGS | options))
